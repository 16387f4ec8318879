"""Commands from the command line: exit codes, output, and files that they must not change."""

import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rungs.checkpointing.weights_file import Weights, WeightsHeader, write_weights
from rungs.cli import reinforce
from rungs.cli.start_command import StartCommand
from rungs.common import command
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.data.text.tokenizer import train_bpe
from tests.support.commands import run_script
from tests.support.committed_runs import ROOT
from tests.support.configs import ONE_FILE, model_config, train_config
from tests.support.tiny_run import make_dataset, make_run

BYTES = 257
IN_SHARDS = 300_000
"""A size between that of one of the byte model's two matrices and that of both."""
PROMPT = "Every effort moves you"


def start_training(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def byte_model(folder: Path, head_scale: float, **train: object) -> Path:
    """Write an A-to-A model of single bytes whose logit of the input byte is `head_scale`."""
    settings = {"dataset": "bytes", "target_offset": 0, "validation_tokens": 160, **train}
    config = RunConfig(
        model_config(vocab_size=BYTES, emb_dim=BYTES, n_layers=0, positions="none", norm="none"),
        train_config(**settings),
    )
    weights = {
        "token_embedding.embedding": np.eye(BYTES, dtype=np.float32),
        "head.kernel": head_scale * np.eye(BYTES, dtype=np.float32),
    }
    header = WeightsHeader(*config, tokenizer="bytes")
    write_weights(folder, weights, header, config.train.max_weights_file_bytes)
    train_bpe([], BYTES).save(folder / "tokenizer.json")
    return folder / "model.safetensors"


@pytest.mark.parametrize("limit", [ONE_FILE, IN_SHARDS])
def test_a_to_a_smoke_test_passes_a_perfect_copy(limit: int, tmp_path: Path) -> None:
    model = byte_model(tmp_path, 9.0, max_weights_file_bytes=limit)
    assert model.is_file() == (limit == ONE_FILE)
    result = run_script("smoke_tests/test_a_to_a.py", model)
    assert result.returncode == 0, result.stderr
    given, _, returned = result.stdout.partition("\nOutput:\n")
    assert given.startswith("Input:\nIt is an ancient Mariner,\n")
    text, _, verdict = returned.strip().rpartition("\n")
    assert text.strip() == given.removeprefix("Input:\n").strip()
    assert verdict == "Passed: it repeats every token; 132 of 132 tokens (100.0%) are correct"


def test_a_to_a_smoke_test_fails_an_imperfect_copy(tmp_path: Path) -> None:
    result = run_script("smoke_tests/test_a_to_a.py", byte_model(tmp_path, -9.0))
    assert result.returncode == 1
    assert "\nFailed: 0 of 132 tokens (0.0%) are correct\n" in result.stdout


def test_generation_smoke_test_continues_the_prompt(tmp_path: Path) -> None:
    result = run_script("smoke_tests/test_generation.py", byte_model(tmp_path, 9.0))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{PROMPT}{'u' * 20}\n"


@pytest.mark.parametrize("limit", [ONE_FILE, IN_SHARDS])
def test_evaluate_prints_loss_perplexity_and_bits_per_byte(limit: int, tmp_path: Path) -> None:
    dataset = tmp_path / "datasets" / "bytes"
    dataset.mkdir(parents=True)
    tokenizer = train_bpe([], BYTES)
    tokenizer.save(dataset / "tokenizer.json")
    tokens = np.array(tokenizer.encode("é" * 200), np.uint16)
    for split in ("train", "validation"):
        save_file({"tokens": tokens}, dataset / f"{split}.safetensors")
    model = byte_model(tmp_path, 0.0, max_weights_file_bytes=limit)
    result = run_script("evaluate.py", model, "--datasets-dir", tmp_path / "datasets")
    assert result.returncode == 0, result.stderr
    figures = [line.split() for line in result.stdout.splitlines()]
    assert figures[0][1:] == ["bytes:", "160", "validation", "tokens"]
    assert float(figures[1][1]) == pytest.approx(math.log(BYTES), abs=1e-4)
    assert float(figures[2][1]) == pytest.approx(BYTES, abs=0.01)
    assert float(figures[3][-1]) == pytest.approx(math.log2(BYTES), abs=1e-4)


def test_evaluate_of_untrained_weights_needs_a_dataset(tmp_path: Path) -> None:
    path = byte_model(tmp_path, 0.0)
    weights = Weights(path)
    arrays = {name: weights.array(name) for name in weights.names()}
    write_weights(tmp_path, arrays, weights.header._replace(train=None), ONE_FILE)
    result = run_script("evaluate.py", path)
    assert result.returncode == 2
    assert "has not been trained on a dataset, so choose a --dataset" in result.stderr
    dataset = tmp_path / "datasets" / "bytes"
    dataset.mkdir(parents=True)
    (tmp_path / "tokenizer.json").rename(dataset / "tokenizer.json")
    save_file({"tokens": np.arange(100, dtype=np.uint16)}, dataset / "train.safetensors")
    save_file({"tokens": np.arange(100, dtype=np.uint16)}, dataset / "validation.safetensors")
    chosen = ("--dataset", "bytes", "--datasets-dir", tmp_path / "datasets")
    result = run_script("evaluate.py", path, *chosen)
    assert result.returncode == 0, result.stderr
    figures = [line.split() for line in result.stdout.splitlines()]
    assert figures[0][1:] == ["bytes:", "96", "validation", "tokens"]  # 12 times the context
    assert float(figures[1][1]) == pytest.approx(math.log(BYTES), abs=1e-4)


def test_evaluate_counts_only_the_answers_of_pairs(tmp_path: Path) -> None:
    """The model predicts that each byte repeats, so counting prompts would change the loss."""
    model = byte_model(tmp_path, 3.0, dataset="pairs", target_offset=1, sequence_length=6)
    pairs = [("aaaa", "b"), ("q", "bbb"), ("a", "éé"), ("", "cc")] * 3
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in pairs]
    file, place = tmp_path / "pairs.jsonl", tmp_path / "datasets"
    file.write_text("\n".join([*lines, *lines]))
    chosen = ("--pairs", file, "--name", "pairs", "--tokenizer", tmp_path)
    made = run_script(
        "download_dataset.py", *chosen, "--validation-percent", 50, "--datasets-dir", place
    )
    assert made.returncode == 0, made.stderr
    assert "12 pairs" in made.stdout
    result = run_script("evaluate.py", model, "--datasets-dir", place)
    assert result.returncode == 0, result.stderr
    hits, targets, text_bytes = 3 * (0 + 2 + 0 + 1), 3 * (2 + 4 + 5 + 2), 3 * (1 + 3 + 4 + 1)
    nats = targets * math.log(math.exp(3) + BYTES - 1) - 3 * hits
    figures = [line.split() for line in result.stdout.splitlines()]
    assert figures[0][1:5] == ["pairs:", str(targets), "validation", "tokens"]
    assert float(figures[1][1]) == pytest.approx(nats / targets, abs=1e-4)
    assert float(figures[2][1]) == pytest.approx(math.exp(nats / targets), rel=1e-4)
    assert float(figures[3][-1]) == pytest.approx(nats / math.log(2) / text_bytes, abs=1e-4)


def test_evaluate_rejects_a_dataset_of_another_tokenizer(tmp_path: Path) -> None:
    model = byte_model(tmp_path, 0.0)
    make_dataset(tmp_path / "datasets", "other")
    train_bpe(["ab ab ab ab"], BYTES + 1).save(tmp_path / "datasets/other/tokenizer.json")
    folder = tmp_path / "datasets"
    result = run_script("evaluate.py", model, "--dataset", "other", "--datasets-dir", folder)
    assert result.returncode == 2
    assert "not the model's tokenizer" in result.stderr


def test_evaluate_says_how_to_build_a_dataset_with_the_models_tokenizer(tmp_path: Path) -> None:
    """The built-in dataset cannot be built with another tokenizer, so the advice is another one."""
    model, place = byte_model(tmp_path, 0.0), ("--datasets-dir", tmp_path / "datasets")
    make_dataset(tmp_path / "datasets", "python-stdlib")
    train_bpe(["ab ab ab ab"], BYTES + 1).save(tmp_path / "datasets/python-stdlib/tokenizer.json")
    refused = run_script("evaluate.py", model, "--dataset", "python-stdlib", *place)
    assert refused.returncode == 2
    advice = refused.stderr.partition(": uv run download_dataset.py ")[2].split()
    (tmp_path / "text").write_text("a new text\n" * 50)
    values = {"FILE": str(tmp_path / "text"), "NAME": "mine"}
    built = run_script("download_dataset.py", *(values.get(x, x) for x in advice), *place)
    assert built.returncode == 0, built.stderr
    result = run_script("evaluate.py", model, "--dataset", "mine", *place)
    assert result.returncode == 0, result.stderr


def test_config_errors_are_reported_before_jax_is_imported(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", learning_rte=3, epochs=0).path
    code = f"""
import sys
from rungs.cli import train
from rungs.common import command
sys.argv = ["train.py", {str(folder)!r}]
try:
    command.run_command(train.main)
finally:
    print("jax" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"error: {folder}/train.json: epochs: 0 is not allowed; must be at least 1",
        f"error: {folder}/train.json: learning_rte: unknown key (value 3);"
        " did you mean learning_rate?",
    ]
    assert result.stdout == "False\n"
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "train.json"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("evaluate.py", "no-such-run"),
        ("plan.py", "no-such-run"),
        ("charts.py", "no-such-run"),
        ("download_dataset.py", "../escape"),
        ("smoke_tests/test_generation.py", "no-such-run"),
    ],
    ids=" ".join,
)
def test_bad_arguments_end_with_exit_code_2(arguments: tuple[str, ...]) -> None:
    result = run_script(*arguments)
    assert result.returncode == 2
    assert result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-run",),
        (),
        ("no-such-run", "--set", "seed=1"),
        ("no-such-run", "--fresh", "--from", "best"),
    ],
    ids=" ".join,
)
def test_bad_arguments_of_training_end_with_exit_code_2_and_one_line(
    arguments: tuple[str, ...],
) -> None:
    result = run_script("train.py", *arguments)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1


@pytest.mark.long
def test_a_copy_that_does_not_fit_its_data_leaves_nothing_behind(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    old = make_run(tmp_path / "old")
    arguments = (tmp_path / "new", "--like", old.path, "--datasets-dir", tmp_path / "datasets")
    result = start_training(*arguments, "--set", "vocab_size=9")
    assert result.returncode == 2
    assert "vocab_size: 9 is too small for the token id" in result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_a_copied_run_trains_and_the_same_command_resumes_it(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    old = make_run(tmp_path / "old", min_train_tokens=2 * 128)
    arguments = (tmp_path / "new", "--like", old.path, "--set", "learning_rate=3e-4")
    for expected in ("starts: 2 steps", "is finished: 2 steps"):
        result = start_training(*arguments, "--datasets-dir", tmp_path / "datasets")
        assert result.returncode == 0, result.stderr
        assert expected in result.stderr
    train = json.loads((tmp_path / "new" / "train.json").read_text())
    assert train["lineage"] == {"like": str(old.path), "set": {"learning_rate": 3e-4}}


@pytest.mark.parametrize("script", ["train.py", "config.py"])
def test_without_uv_a_command_says_how_to_run_it_in_one_line(script: str) -> None:
    without_libraries = [sys.executable, "-S", script, "runs/layers"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        without_libraries, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    (line,) = ended.stderr.splitlines()
    assert line == (
        f"error: {sys.executable} has no module click; use uv, which installs it:"
        f" uv run {script} runs/layers"
    )
    assert ended.returncode == 1


def test_the_exception_hook_is_set_when_a_command_begins_not_at_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    module = importlib.reload(command)
    assert sys.excepthook is sys.__excepthook__
    module.begin_command()
    assert sys.excepthook is not sys.__excepthook__


def test_the_options_of_a_start_start_nothing() -> None:
    given = ["run", "--supervise", "--max-restarts", "3", "--json-log"]
    options = reinforce.main.make_context("reinforce", given).params
    shared = {
        key: options[key]
        for key in options
        if key not in ("trust_verifier", "is_audit", "checks_environment")
    }
    start = StartCommand(**shared)
    assert (start.run, start.supervise, start.max_restarts) == ("run", True, 3)
    assert start.log_options == ["--json-log"]
    start.check()
    with pytest.raises(UserError, match="--supervise: is for training a single run"):
        dataclasses.replace(start, run=None).check()
