"""The commands of the pages that most readers follow run, in a copy of the checkout whose runs are
short, or stand in a list with the reason why they don't. Those of other pages have arguments that
the commands take."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.docs.test_task_pages import ONLY_READ
from tests.support.checkout import publish, run_shell
from tests.support.commands import check_arguments
from tests.support.committed_runs import ROOT
from tests.support.documented_commands import PAGES, commands, is_fenced

LONGER = """
sed -i 's/^{/{"epochs": 2, /' runs/layers/train.json runs/books/train.json
"""
"""Shell that lets the runs train longer."""
INSTEAD = {
    "charts.py RUN RUN …": "charts.py runs/layers runs/warmer",
    "download_dataset.py --text FILE --name NAME --vocab-size N": (
        "download_dataset.py --text books/models.txt --name small --vocab-size 300"
    ),
    "download_dataset.py --tokens FILE --name NAME --tokenizer gpt2": (
        "download_dataset.py --tokens ids.npy --name ids --vocab-size 5000"
    ),
    "pretrained.py import gemma-3-270m-q4_k_m.gguf runs/gemma-q4": (
        "pretrained.py import qwen-q8.gguf runs/gemma-q4"
    ),
    "pretrained.py import ID RUN": "pretrained.py import openai-community/gpt2 runs/gpt2",
    "experiment.py EXPERIMENT": "experiment.py qk-norm --dry-run",
    "reinforce.py RUN": "reinforce.py runs/parity-rl",
    "pretrained.py import FOLDER RUN": "pretrained.py import openai-community/gpt2 runs/gpt2",
    "pretrained.py export RUN FOLDER --jax-gpt2": "pretrained.py export runs/layers out --jax-gpt2",
    "train.py runs/NAME": "train.py runs/next-token",
    "train.py RUN DATASETS best": "train.py RUN datasets best",
    "train.py RUN --preset gpt2-medium": (
        "train.py runs/sized --preset gpt2-medium --set emb_dim=32 --set n_layers=2"
        " --set sequence_length=128 --set min_train_tokens=8192"
    ),
    "train.py runs/medium --preset gpt2-medium --set dataset=novels": (
        "train.py runs/medium --preset gpt2-medium --set emb_dim=32 --set n_layers=2"
        " --set sequence_length=128 --set min_train_tokens=8192"
    ),
}
"""What is run in place of a command with a placeholder, or of one that takes long."""
EDITED = {"train.py RUN --extend": f"{LONGER}uv run train.py runs/layers --extend"}
"""After an edit that the page asks for."""
NOT_RUN: dict[str, tuple[str, ...]] = {
    "a tool of those who work on Rungs": (
        *("pytest", "RUNGS_FUZZ_FACTOR=20 uv run pytest", "ruff", "mypy", "lint-imports"),
        *("--group", "tests/fixtures/make_models.py", "RUNGS_TRANSFORMERS_PYTHON=PATH"),
        *("RUNGS_LLAMA_CPP_PYTHON=PATH", "notebooks/execute.py"),
    ),
    "writes committed files, which tests/config/test_run_config.py compares": ("config.py",),
    "takes minutes to hours; tests/benchmarks": ("benchmarks/",),
    "needs the hub: tests/data/build/test_hub_dataset.py, tests/cli/test_upload.py": (
        *("download_dataset.py owner/name", "download_dataset.py gpjt/fineweb-gpt2-tokens"),
        *("download_dataset.py roneneldan/TinyStories", "download_dataset.py HuggingFaceFW"),
        *("download_dataset.py --tokens train.bin", "download_dataset.py --tokens fineweb_train"),
        *("pretrained.py upload runs/llama OWNER/NAME", "pretrained.py upload runs/qwen"),
    ),
    "needs a bucket: tests/integrations/test_buckets.py": (
        "train.py runs/layers --mirror s3://bucket/layers",
        ".uv/bin/uv run download_dataset.py",
        ".uv/bin/uv run train.py ~/bucket",
    ),
    "needs a student's model: assignment/tests": (
        *("assignment/load.py", "generate.py runs/mine", "train.py runs/mine"),
        *("download_dataset.py --text text.txt --name mine", "charts.py runs/layers runs/mine"),
    ),
    "needs PyTorch: assignment/tests/test_adapters.py": (
        "PYTHONPATH=../rungs uv run --project ../rungs",
    ),
    "needs PyTorch: tests/huggingface": (
        "pretrained.py import openai-community/gpt2 runs/gpt2 --check",
    ),
    "needs the extra eval: tests/evaluation": ("evaluate.py runs/gpt2 --tasks",),
    "needs a TPU's compiler: tests/planning/test_compiled_step.py": (
        "plan.py runs/gpt2-small --device tpu-v5e",
    ),
    "runs until it is interrupted: tests/report, tests/serving": (
        *("charts.py runs/ --watch", "serve.py"),
    ),
    "takes minutes: tests/checks, tests/faults, tests/cli/test_mup.py": ("smoke_tests/", "mup.py"),
    "needs Optuna: tests/experiments/test_kinds.py": ("experiment.py experiments/agent",),
    "takes minutes; tests/experiments": ("experiment.py records/",),
    "needs a failed step: tests/training/test_failed_steps.py": ("train.py RUN --replay",),
    "needs changed code": (
        *("train.py runs/relu", "smoke_tests/test_model.py runs/relu"),
        "charts.py runs/layers runs/relu",
    ),
    "needs a package: tests/docs/test_task_pages.py, tests/notebooks": ("--with-editable",),
    "needs a GPU of AMD": ("--with jax-rocm7-plugin",),
}
"""How commands that don't run begin, by where else they are tried or why they can't be."""

RUN = ["README.md"]
"""Pages whose commands run; besides those of tasks."""
BEFORE = {
    "docs/tasks/serve-and-share.md": (
        "uv run pretrained.py import Qwen/Qwen2.5-0.5B-Instruct runs/qwen"
    ),
    "docs/tasks/train-on-my-text.md": (
        "uv run train.py runs/layers; cp -r runs/layers runs/books" + LONGER
    ),
}
"""Before the commands of a page."""


_PAGES = [page for page in PAGES if page in RUN or page.startswith("docs/tasks/")]


def plain(command: str) -> str:
    """Return the shell that runs a command: without extras, and with runs and files that exist."""
    command = without_extras(command)
    start, _, rest = command.partition("uv run ")
    shell = f"{start}uv run {INSTEAD.get(rest, rest)}" if rest not in EDITED else EDITED[rest]
    return re.sub(r"(?<= )RUN(?= |$)", "runs/layers", shell)


def without_extras(command: str) -> str:
    return re.sub(r"--extra \S+ ", "", command)


def reason(page: str, command: str) -> str | None:
    """Return why a command isn't run here."""
    short = without_extras(command).removeprefix("uv run ")
    path = ROOT / page
    in_task = path.parent.name == "tasks" and path.stem not in ONLY_READ
    if in_task and is_fenced(path, command) and "--extra cuda" not in command:
        return "tests/docs/test_task_pages.py"
    for why, starts in NOT_RUN.items():
        if short.startswith(starts):
            return why
    return "incomplete" if plain(command).endswith("…") else None


def to_run(page: str) -> list[str]:
    """Return the commands of a page that run here and are on no page before it."""
    before = [c for other in _PAGES[: _PAGES.index(page)] for c in _run_on(other)]
    return [command for command in _run_on(page) if command not in before]


def _run_on(page: str) -> list[str]:
    return list(dict.fromkeys(plain(c) for c in commands(page) if reason(page, c) is None))


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_files(checkout: Path) -> None:
    """Write the files that the pages take for granted."""
    texts = {path.stem: path.read_text() for path in sorted((checkout / "books").iterdir())}
    for folder in ("novels", "mine"):
        (checkout / folder).mkdir()
    (checkout / "novels/one.txt").write_text(texts["models"])
    shutil.copy(ROOT / "README.md", checkout)
    parts = [part for text in texts.values() for part in text.split("\n\n")]
    column = pa.table({"body": parts})
    parquet.write_table(column, checkout / "mine/one.parquet")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in parts)
    with pa.CompressedOutputStream(checkout / "notes.jsonl.zst", "zstd") as file:
        file.write(rows.encode())
    pairs = [{"prompt": f"{n}: ", "answer": f"{n % 7} of {n}"} for n in range(400)]
    write_lines(checkout / "recipes.jsonl", pairs)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    np.save(checkout / "ids.npy", np.arange(20_000) % 5_000)
    write_lines(checkout / "talk.jsonl", [{"messages": chat, "id": n} for n in range(400)])
    item = {"prompt": "def", "choices": [" main", " class"], "answer": 0}
    for name in ("quiz.jsonl", "hellaswag.jsonl"):
        write_lines(checkout / name, [item] * 4)
    (checkout / "notify.py").touch()


def write_runs(checkout: Path) -> None:
    """Write the runs that the pages take for granted, and smaller ones in place of large ones."""
    small = {"vocab_size": 4096, "context_length": 128, "emb_dim": 32, "n_layers": 2, "n_heads": 2}
    change(checkout / "runs/gpt2-small/model.json", **small)
    data = {"dataset": "python-stdlib", "gradient_accumulation_steps": 2}
    change(checkout / "runs/gpt2-small/train.json", **data)
    change(checkout / "runs/mup/model.json", n_layers=2)


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in _PAGES if to_run(page)])
def test_commands_run(page: str, checkout: Path) -> None:
    for name in ("openai-community/gpt2", "Qwen/Qwen2.5-0.5B-Instruct"):
        (checkout / name).parent.mkdir()
        publish(checkout / name)
    write_files(checkout)
    write_runs(checkout)
    assert not run_shell(BEFORE.get(page, ""), checkout)
    found = [run_shell(command.replace(" & ", " &\n"), checkout) for command in to_run(page)]
    assert not "".join(found)


def test_what_is_listed_is_documented() -> None:
    every = [
        without_extras(command).removeprefix("uv run ")
        for page in PAGES
        for command in commands(page)
    ]
    assert {*INSTEAD, *EDITED} <= set(every)
    for start in [start for starts in NOT_RUN.values() for start in starts]:
        assert any(command.startswith(start) for command in every), start


@pytest.mark.parametrize("page", PAGES)
def test_commands_take_their_arguments(page: str) -> None:
    """Also those of benchmarks, which are not run."""
    for command in commands(page):
        _, _, line = re.sub(r"--(with-editable|group) \S+ ", "", plain(command)).partition(
            "uv run "
        )
        for part in (
            line.replace("FILE …", "README.md").replace("FOLDER", "docs").split(" & uv run ")
        ):
            script, *words = shlex.split(part)
            if script == "pytest":
                assert all((ROOT / word.partition("::")[0]).exists() for word in paths_in(words))
            if script.endswith(".py") and words != ["…"] and has_options(script):
                check_arguments(script, words)


def paths_in(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith(("tests", "assignment"))]


def has_options(script: str) -> bool:
    return "import click\n" in (ROOT / script).read_text()
