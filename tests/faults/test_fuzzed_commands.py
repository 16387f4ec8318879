"""Whatever arguments a command gets, it works or ends with clear lines and exit code 2, and changes
no file."""

from rungs.common.command import run_command

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import charts
import download_dataset
import evaluate
import generate
import plan
import pretrained
import train
from rungs.checkpointing.checkpoint_folder import find_weights
from rungs.commands.generate import read_prompts
from rungs.common.errors import EXIT_BAD_INPUT, UserError
from rungs.data.bpe import train_bpe
from rungs.data.builders.sections import TextSection
from rungs.data.builders.token_formats import TokenSection
from rungs.data.catalog import open_dataset
from rungs.data.dataset import Dataset
from rungs.data.tokenizer_files import load_tokenizer
from rungs.huggingface.importing import find_source
from rungs.report.comparison_charts import loss_by_step
from rungs.run import recorded_run
from rungs.run.derive import create_like
from rungs.run.folder import RunFolder, find_run
from rungs.run.metrics import MetricsLog, StepMetrics
from rungs.run.recorded_run import RecordedRun
from rungs.training.failed_step import open_failed_step
from tests.commands.test_commands import byte_model
from tests.faults.fuzzing import (
    ODD_TEXTS,
    as_json,
    assert_clear,
    attempt,
    bad_json,
    bad_object,
    deadline,
    examples,
    odd_values,
    put,
    snapshot,
)
from tests.support.committed_runs import ROOT
from tests.support.published_models import MODELS
from tests.support.tiny_run import MODEL, TRAIN, make_dataset, make_run

Capture = pytest.CaptureFixture[str]
STEP = {
    "global_step": 1,
    "tokens_seen": 128,
    "train_loss": 1.0,
    "learning_rate": 0.1,
    "gradient_norm": 1.0,
    "clipped": False,
    "dropped_microbatches": 0,
    "step_seconds": 0.1,
    "tokens_per_second": 1280.0,
    "validation_loss": 2.0,
    "expert_tokens": [[1, 2], [3, 4]],
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, weights, a dataset, a published model and things of wrong kinds."""
    folder = tmp_path_factory.mktemp("workspace")
    make_run(folder / "run")
    make_dataset(folder / "datasets")
    Dataset("tiny", folder / "datasets" / "tiny")
    train_bpe(["a b"], 257).save(folder / "tokenizer.json")
    byte_model(folder, 1.0)
    (folder / "empty").mkdir()
    (folder / "file").write_text("text\n" * 9)
    (folder / "bytes").write_bytes(b"\xff\xfe\x00")
    (folder / "link").symlink_to("nowhere")
    (folder / "model").symlink_to(MODELS / "gpt2")
    os.mkfifo(folder / "pipe")
    return folder


class Started(Exception):
    """A command has checked its arguments and would start its work."""


@pytest.fixture(autouse=True)
def in_workspace(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in that folder, without a network and without the work that comes after all checks."""

    def work(*_: object, **__: object) -> None:
        raise Started

    def train(*_: object) -> None:
        raise UserError("starts; an error of the user leaves no lock file behind")

    monkeypatch.chdir(workspace)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (
        "rungs.report.comparison_charts.draw_comparison",
        "rungs.data.catalog._build_folder",
        "rungs.report.run_page.write_page",
        "rungs.report.page_server.PageServer.serve_forever",
        "rungs.commands.grid.run_grid",
        "rungs.commands.start_command.supervise_run",
        "rungs.commands.evaluate.validation_losses",
        "rungs.planning.forecast.memory_of",
        "rungs.model.generation.Generator",
        "rungs.parallel.processes.join",
        "rungs.common.disk.create_folder",
    ):
        monkeypatch.setattr(name, work)
    monkeypatch.setattr("rungs.training.start.launch", train)


def assert_ends_well(command: click.Command, arguments: list[str], capsys: Capture) -> None:
    """The exit code is 0 or 2, the error lines are clear, and no file is changed."""
    before = snapshot(Path.cwd())
    code: object = 0
    try:
        with deadline(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["command.py", *arguments])
            run_command(command)
    except SystemExit as end:
        code = end.code or 0
    except Started:
        pass
    errors = capsys.readouterr().err
    assert code in (0, EXIT_BAD_INPUT), errors
    assert "Traceback" not in errors
    if code == EXIT_BAD_INPUT:
        assert_clear("\n".join(filter(None, errors.split("\n"))))
    assert snapshot(Path.cwd()) == before


texts = st.sampled_from([text for text in ODD_TEXTS if "\0" not in text])
PLACES = (
    *("run", "run/model.json", "empty", "file", "file/inside", "bytes", "link", "model", "pipe"),
    *("nothing", "datasets", "datasets/tiny", "model.safetensors", "tokenizer.json", "tiny"),
    *("/dev/null", "/dev/zero", "..", "~", "a/" * 2500, "\udcff", "\ud800", "é"),
    *("python-stdlib", "owner/name"),
)
paths = st.sampled_from(PLACES)
numbers = st.sampled_from(["0", "1", "-1", "2", "nan", "inf", "1e999", "1" * 30, "1" * 5000, "0x1"])
words = st.one_of(paths, paths, paths, numbers, texts, st.text("-=a\u202e\x1b\udc80 ", max_size=6))
settings_given = st.tuples(
    st.sampled_from([*MODEL, *TRAIN, "", "unknown", "\ud800", "lineage", "$schema"]),
    st.one_of(odd_values.map(lambda value: as_json(value).decode()), texts, numbers),
).map("=".join)


def arguments_of(*options: str) -> st.SearchStrategy[list[str]]:
    """Return arguments for a command that has these options."""
    option = st.sampled_from([*options, "--help", "--unknown", "-x", "--", "--no-fresh"])
    given_one = st.tuples(option, words).map(list)
    alone, with_equals = option.map(lambda name: [name]), given_one.map(lambda two: ["=".join(two)])
    setting = settings_given.map(lambda setting: ["--set", setting])
    part = st.one_of(
        words.map(lambda word: [word]), given_one, given_one, alone, with_equals, setting
    )
    return st.lists(part, max_size=5).map(lambda parts: [word for part in parts for word in part])


def also_after(strategy: st.SearchStrategy[list[str]], *first: str) -> st.SearchStrategy[list[str]]:
    """Return the same arguments, or those after arguments that the command accepts."""
    return strategy | strategy.map(lambda rest: [*first, *rest])


@examples(50)
@given(
    arguments=also_after(
        arguments_of("--like", "--set", "--from", "--fresh", "--extend", "--datasets-dir")
        | arguments_of("--mirror")
        | arguments_of("--coordinator", "--processes", "--process"),
        "run",
    )
)
def test_train(arguments: list[str], capsys: Capture) -> None:
    assert_ends_well(train.main, arguments, capsys)


@examples(50)
@given(settings=st.lists(settings_given, max_size=3), name=paths | texts)
def test_train_like(settings: list[str], name: str, capsys: Capture) -> None:
    pairs = [word for setting in settings for word in ("--set", setting)]
    assert_ends_well(train.main, [name, "--like", "run", *pairs], capsys)


@examples(40)
@given(
    arguments=also_after(
        arguments_of("--device", "--sharding", "--utilization", "--tokens-per-second")
        | arguments_of("--device", "--sharding", "--json", "--datasets-dir")
        | arguments_of("--price-per-hour", "--tokens-per-second", "--device", "--json")
        | arguments_of("--ladder", "--rungs", "--into", "--json"),
        "run",
    )
)
def test_plan(arguments: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    assert_ends_well(plan.main, arguments, capsys)


@examples(40)
@given(
    arguments=also_after(
        arguments_of("--prompts-file", "--new-tokens", "--num-samples", "--temperature", "--top-k")
        | arguments_of("--top-p", "--min-p", "--repetition-penalty", "--seed", "--past-the-end")
        | arguments_of("--dtype", "--prompts-file"),
        "model.safetensors",
        "a",
    ).filter(lambda words: "--num-samples" not in words or "1" * 30 not in words)
)
def test_generate(arguments: list[str], capsys: Capture) -> None:
    assert_ends_well(generate.main, arguments, capsys)


@examples(25)
@given(
    arguments=also_after(
        arguments_of("--dataset", "--datasets-dir"),
        "model.safetensors",
        "--dataset",
        "tiny",
        "--datasets-dir",
        "datasets",
    )
)
def test_evaluate(arguments: list[str], capsys: Capture) -> None:
    assert_ends_well(evaluate.main, arguments, capsys)


@examples(60)
@given(
    arguments=also_after(
        arguments_of("--text", "--pairs", "--name", "--vocab-size", "--tokenizer")
        | arguments_of("--validation-percent", "--datasets-dir", "--name", "--text")
        | arguments_of("--tokens", "--vocab-size", "--validation-file", "--name"),
        "--text",
        "file",
        "--name",
        "new",
    )
)
def test_download_dataset(arguments: list[str], capsys: Capture) -> None:
    assert_ends_well(download_dataset.main, arguments, capsys)


@examples(25)
@given(arguments=arguments_of("--public", "--datasets-dir"))
def test_upload(arguments: list[str], capsys: Capture) -> None:
    assert_ends_well(pretrained.main, ["upload", *arguments], capsys)


@examples(25)
@given(arguments=also_after(arguments_of("--output-dir", "--style", "--power-law"), "run"))
def test_charts(arguments: list[str], capsys: Capture) -> None:
    assert_ends_well(charts.main, arguments, capsys)


@examples(40)
@given(
    arguments=also_after(arguments_of("--revision", "--ignore-key"), "import", "model", "new")
    | also_after(arguments_of("--revision", "--ignore-key"), "import")
    | also_after(arguments_of(), "export")
)
def test_pretrained(arguments: list[str], capsys: Capture) -> None:
    assert_ends_well(pretrained.main, arguments, capsys)


READERS: dict[str, Callable[[str], object]] = {
    "a run": find_run,
    "a run to make": lambda place: create_like(place + "/new", "run", ["seed=x"]).__enter__(),
    "weights": find_weights,
    "a tokenizer": load_tokenizer,
    "a published model": lambda place: find_source(place + "/in/it"),
    "a dataset": lambda place: open_dataset("tiny", Path(place)),
    "a dataset of the hub": lambda place: open_dataset("owner/name", Path(place)),
    "prompts": lambda place: read_prompts(Path(place)),
    "text": lambda place: TextSection.of_file(Path(place)),
    "tokens": lambda place: TokenSection.of_file(Path(place)),
    "a failed step": lambda place: open_failed_step(RunFolder(Path("runs/none")), place),
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("name", ["x" * 300, "a/" * 2500, "file/inside", "\ud800", "a\0b", "link"])
def test_an_impossible_path_is_reported(what: str, name: str) -> None:
    outcome = attempt(lambda: READERS[what](name), Path.cwd())
    assert isinstance(outcome, UserError)


@pytest.mark.parametrize(
    "script", ["train", pytest.param("download_dataset", marks=pytest.mark.long)]
)
def test_a_process_with_arguments_that_are_not_utf8(script: str, workspace: Path) -> None:
    command = [sys.executable, str(ROOT / f"{script}.py"), "\udcff\x1b[31m", "--\udcfe"]
    ended = subprocess.run(command, capture_output=True, check=False, cwd=workspace)
    assert ended.returncode == EXIT_BAD_INPUT
    assert b"Traceback" not in ended.stderr
    assert all(line.isprintable() for line in ended.stderr.decode().split("\n"))


Lines = st.lists(
    st.one_of(
        bad_json({"global_step": 1, "train_loss": 1.0, "clipped": False, "learning_rate": 0.1}),
        bad_object(STEP),
    ),
    max_size=4,
)


@examples(20)
@given(lines=Lines)
def test_any_metrics_are_drawn(lines: list[bytes], tmp_path: Path) -> None:
    run = (
        make_run(tmp_path / "run")
        if not (tmp_path / "run").exists()
        else RunFolder(tmp_path / "run")
    )
    valid = [json.dumps(STEP | {"global_step": number}).encode() for number in range(3)]
    put(run.metrics, b"\n".join([*valid, *lines]))
    recorded = attempt(lambda: RecordedRun.load(run.path), tmp_path)
    assert isinstance(recorded, RecordedRun)
    assert (recorded.column("global_step") < 3).any()
    assert recorded_run.results_table([recorded])
    loss_by_step([recorded])
    put(run.metrics.with_name("again"), run.metrics.read_bytes())
    MetricsLog(run.metrics.with_name("again"), 2, StepMetrics).__exit__()
