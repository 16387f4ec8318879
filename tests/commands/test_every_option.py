"""Every option of every command is given at least once in a command that a user could type, in a
process of its own, with a model that has layers and compilation as it is by default."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_options import all_options, given_options
from tests.support.committed_runs import ROOT

TEXT = "The quick brown fox jumps over the lazy dog, and 12 birds sing.\n"
MODEL = {"vocab_size": 257, "context_length": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 2}
TRAIN = {
    "dataset": "words",
    "microbatch_size": 4,
    "min_train_tokens": 2_048,
    "validation_tokens": 512,
    "learning_rate": 0.01,
    "checkpoint_interval": 4,
    "sample_prompts": ["The"],
}
SETUP = (
    "download_dataset.py --text words.txt --name words --vocab-size 257 --validation-percent 20"
    " --datasets-dir datasets",
    "train.py run --datasets-dir datasets --json-log --mirror copies --on-event true",
)
"""What the other commands work with."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": (
        "train.py other --like run --set learning_rate=0.02 --datasets-dir datasets --quiet"
        " --supervise --max-restarts 1",
        "train.py other --from step-000004 --datasets-dir datasets --coordinator localhost:29517"
        " --processes 1 --process 0",
        "train.py other --fresh --dry-run --datasets-dir datasets",
        "train.py --like run --grid learning_rate=0.01,0.02 --into grid --datasets-dir datasets",
    ),
    "generate": (
        "generate.py run The --new-tokens 9 --dtype bfloat16 --lookahead 3 --past-the-end",
        "generate.py run --prompts-file words.txt --num-samples 2 --temperature 0.9 --top-k 40"
        " --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --seed 1 --weights int8"
        " --new-tokens 5",
        "generate.py run The --chat --system Hello --chat-template chat.jinja --new-tokens 5"
        " --dtype bfloat16 --weights int8 --lookahead 2",
    ),
    "datasets": (
        "download_dataset.py --pairs pairs.jsonl --name pairs --tokenizer datasets/words"
        " --datasets-dir datasets",
        "download_dataset.py --chats chats.jsonl --name chats --tokenizer datasets/words"
        " --chat-template chat.jinja --max-tokens 60 --datasets-dir datasets",
        "download_dataset.py --jsonl documents.jsonl --name documents --text-column body"
        " --max-bytes 20000 --tokenizer datasets/words --datasets-dir datasets",
        "download_dataset.py words --check --datasets-dir datasets",
        "download_dataset.py words --items items.jsonl --datasets-dir datasets",
    ),
    "evaluate": (
        "evaluate.py run --dataset words --datasets-dir datasets",
        "evaluate.py run --choices items.jsonl --limit 3 --batch-size 2",
    ),
    "show": (
        "checkpointing.py run --verify --json",
        "model.py run --json --data 2 --tensor 2 --context 2",
        "charts.py run --output-dir drawn --style plain",
        "charts.py run --page page.html",
        "charts.py run --samples",
        "pretrained.py export run exported",
    ),
    "plan": (
        "plan.py run --device h100 --sharding fsdp:2 --utilization 40 --price-per-hour 2 --json"
        " --datasets-dir datasets",
        "plan.py run --tokens-per-second 1000 --datasets-dir datasets",
        "plan.py run --ladder 1e12 --rungs 2 --into ladder --datasets-dir datasets",
    ),
    "mup": (
        "mup.py check wide --widths 32,64 --steps 4 --learning-rate 0.01 --chart check.png"
        " --datasets-dir datasets",
        "mup.py sweep wide --widths 32,64 --learning-rates 0.01,0.02 --standard --into sweep"
        " --datasets-dir datasets",
    ),
    "model check": (
        "smoke_tests/test_model.py run --sequences 2 --tokens 16 --steps 100 --datasets-dir"
        " datasets",
    ),
    "parallel check": (
        "smoke_tests/test_parallel.py run --devices 2 --steps 1 --sequences 2 --tokens 16"
        " --datasets-dir datasets",
    ),
}
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "runs until it is interrupted: tests/page": ("charts.py --watch", "charts.py --port"),
    "needs three trained runs: tests/scaling": ("charts.py --power-law",),
    "needs a hub; against a stand-in in tests/data, tests/huggingface, tests/commands": (
        *(f"download_dataset.py --{name}" for name in ("config", "files", "revision", "split")),
        "pretrained.py import --revision",
        "pretrained.py upload --datasets-dir",
        "pretrained.py upload --public",
    ),
    "needs a file of an optional library: tests/data, tests/linen, tests/huggingface": (
        "download_dataset.py --parquet",
        "pretrained.py import --linen",
        "pretrained.py import --check",
        "pretrained.py import --python",
        "pretrained.py import --ignore-key",
        "pretrained.py export --adapter",
    ),
    "needs the compiler of an accelerator: tests/planning/compiled": (
        "plan.py --compile",
        "plan.py --roofline",
    ),
    "needs the extra eval: tests/evaluation": (
        *(f"evaluate.py --{name}" for name in ("tasks", "task-files", "few-shot")),
    ),
    "trains until it is killed, or needs a failed step: tests/training, tests/smoke_tests": (
        "train.py --extend",
        "train.py --replay",
        "smoke_tests/test_device.py --into",
        *(f"smoke_tests/test_resume.py --{n}" for n in ("datasets-dir", "keep", "kills", "tokens")),
    ),
    "tests/reinforcement; what it shares with train.py is in one place": (
        *(f"reinforce.py --{n}" for n in ("audit", "trust-verifier", "replay", "extend", "fresh")),
        *(f"reinforce.py --{n}" for n in ("from", "like", "set", "mirror", "on-event", "dry-run")),
        *(f"reinforce.py --{n}" for n in ("supervise", "max-restarts", "quiet", "json-log")),
        *(f"reinforce.py --{n}" for n in ("coordinator", "processes", "process")),
    ),
}
"""Options that no command above gives, by where they are tried or why they can't be."""


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}


def run(line: str, folder: Path) -> None:
    script, *words = shlex.split(line)
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *words],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr, f"{line}\n{done.stderr[-2000:]}"


def write_lines(path: Path, rows: list[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was trained, and files of each kind that commands read."""
    place = tmp_path_factory.mktemp("every_option")
    (place / "words.txt").write_text("".join(f"{n} {TEXT}" for n in range(100)))
    write_lines(place / "pairs.jsonl", [{"prompt": f"{n}:", "answer": "a"} for n in range(40)])
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    write_lines(place / "chats.jsonl", [{"messages": chat, "id": n} for n in range(40)])
    write_lines(place / "documents.jsonl", [{"body": f"{n} {TEXT}"} for n in range(100)])
    item = {"prompt": "The", "choices": [" fox", " dog"], "answer": 0}
    write_lines(place / "items.jsonl", [item] * 4)
    (place / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    for name, mup in (("run", {}), ("wide", {"mup": {"base_emb_dim": 32}})):
        (place / name).mkdir()
        (place / name / "model.json").write_text(json.dumps(MODEL | mup))
        (place / name / "train.json").write_text(json.dumps(TRAIN))
    for line in SETUP:
        run(line, place)
    return place


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_run(name: str, folder: Path) -> None:
    for line in COMMANDS[name]:
        run(line, folder)


def test_every_option_is_given() -> None:
    lines = [*SETUP, *(line for lines in COMMANDS.values() for line in lines)]
    given = set().union(*(given_options(*shlex.split(line)) for line in lines))
    listed = {
        (command, option)
        for options in ELSEWHERE.values()
        for command, _, option in (text.rpartition(" ") for text in options)
    }
    assert given | listed == all_options()
    assert not given & listed, "given after all"
