"""Every option of every command is given at least once in a command that a user could type, in a
process of its own, with a model that has layers and compilation as it is by default."""

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.tasks.catalog import BUILT_IN
from tests.support.checkout import publish
from tests.support.command_options import all_options, given_options
from tests.support.committed_runs import ROOT
from tests.support.document_files import parquet
from tests.support.hub_stand_in import DATASET, HubStandIn
from tests.support.hub_stand_in import MODEL as HUB_MODEL
from tests.support.writable_hub import WritableHub

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
PARITY = {
    "vocab_size": len(BUILT_IN["parity"].alphabet) + 1,
    "context_length": 40,
    "positions": "rope",
}
TUNING = {
    "dataset": "tuned",
    "start_from": "imported",
    "lora": {"rank": 2, "alpha": 4, "targets": ["query", "value"]},
    "sequence_length": 64,
}
REINFORCE = {
    "start_from": "parity",
    "tasks": [{"source": "parity", "verifier": "reward.py"}],
    "steps": 4,
    "max_new_tokens": 8,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "microbatch_size": 4,
    "validation_samples": 2,
    "learning_rate": 0.001,
    "checkpoint_interval": 2,
}
REWARD = """
def reward(prompt, completion, answer, info):
    return float(completion.strip().endswith(answer))
"""
SETUP = (
    "download_dataset.py --text words.txt --name words --vocab-size 257 --validation-percent 20"
    " --datasets-dir datasets",
    "train.py run --datasets-dir datasets --json-log --mirror copies --on-event true",
)
"""What the other commands work with."""
SMALLER = " ".join(
    f"--set {key}={value}"
    for key, value in {
        **{"emb_dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8},
        **{"ffn_dim": 16, "vocab_size": 257, "dataset": "words", "sequence_length": 64},
        **{"min_train_tokens": 2_048, "validation_tokens": 512},
    }.items()
)
"""Changes of a preset's keys, for a model that trains in seconds."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": (
        "train.py other --like run --set learning_rate=0.02 --datasets-dir datasets --quiet"
        " --supervise --max-restarts 1",
        "train.py other --from step-000004 --datasets-dir datasets --coordinator localhost:29517"
        " --processes 1 --process 0",
        "train.py other --fresh --dry-run --datasets-dir datasets",
        "train.py other --fresh --profile 1 --datasets-dir datasets",
        "train.py --like run --grid learning_rate=0.01,0.02 --into grid --datasets-dir datasets",
        f"train.py sized --preset qwen3-0.6b {SMALLER} --datasets-dir datasets",
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
        "download_dataset.py --preferences prefs.jsonl --name prefs --tokenizer datasets/words"
        " --max-tokens 60 --datasets-dir datasets",
        "download_dataset.py --jsonl documents.jsonl --name documents --text-column body"
        " --max-bytes 20000 --tokenizer datasets/words --datasets-dir datasets",
        "download_dataset.py --parquet documents.parquet --name table --text-column body"
        " --tokenizer datasets/words --datasets-dir datasets",
        "download_dataset.py --tokens train.bin --validation-file val.npy --name ids --tokenizer"
        " datasets/words --datasets-dir datasets",
        "download_dataset.py words --check --datasets-dir datasets",
        "download_dataset.py words --items items.jsonl --datasets-dir datasets",
    ),
    "distillation": (
        "train.py pupil --like run --set objective=distill --set teacher=run --set teacher_top_k=5"
        " --datasets-dir datasets --store-teacher",
        "train.py pupil --datasets-dir datasets --quiet",
    ),
    "evaluate": (
        "evaluate.py run --dataset words --datasets-dir datasets",
        "evaluate.py run --choices items.jsonl --limit 3 --batch-size 2",
    ),
    "show": (
        "checkpointing.py run --verify --json",
        "model.py run --json --data 2 --tensor 2 --context 2",
        "model.py run --look 'The quick brown fox'",
        "charts.py run --output-dir drawn --style plain",
        "charts.py run --page page.html",
        "charts.py run --samples",
        "pretrained.py export run exported",
    ),
    "branches and averages": (
        "train.py branch --like run --from-step 4 --set schedule=linear --datasets-dir datasets",
        "generate.py branch The --weights ema --new-tokens 5",
        "evaluate.py run --weights ema --datasets-dir datasets",
        "pretrained.py export run averaged --weights ema",
        "checkpointing.py run --average 2",
    ),
    "power law": (
        "train.py --like run --grid emb_dim=16,32,48 --into sizes --datasets-dir datasets",
        "charts.py --power-law sizes/emb_dim=16 sizes/emb_dim=32 sizes/emb_dim=48",
    ),
    "published": (
        "pretrained.py import published runs/tuned --ignore-key odd",
        "download_dataset.py --text words.txt --name tuned --datasets-dir datasets"
        " --validation-percent 20 --tokenizer runs/tuned/checkpoints/imported",
        "train.py runs/tuned --datasets-dir datasets",
        "pretrained.py export runs/tuned adapter --adapter",
        "pretrained.py export runs/tuned tuned.gguf --dtype q8_0",
    ),
    "reinforce": (
        "train.py parity --datasets-dir datasets",
        "reinforce.py rl --trust-verifier --quiet --mirror rl-copy --on-event true --supervise"
        " --max-restarts 1",
        "reinforce.py rl --audit",
        "reinforce.py rl --trust-verifier --replay step-000001",
        "reinforce.py rl --trust-verifier --from step-000002 --json-log"
        " --coordinator localhost:29518 --processes 1 --process 0",
        "reinforce.py rl --trust-verifier --fresh",
        "reinforce.py rl-two --like rl --set learning_rate=0.002 --set steps=2 --trust-verifier",
    ),
    "resume check": (
        "smoke_tests/test_resume.py run --kills 1 --tokens 2048 --keep kept --datasets-dir"
        " datasets",
    ),
    "device check": ("smoke_tests/test_device.py run --into .",),
    "plan": (
        "plan.py run --device h100 --sharding fsdp:2 --utilization 40 --price-per-hour 2 --json"
        " --datasets-dir datasets",
        "plan.py run --tokens-per-second 1000 --datasets-dir datasets",
        f"plan.py planned --preset qwen3-0.6b {SMALLER} --datasets-dir datasets",
        "plan.py run --ladder 1e12 --rungs 2 --into ladder --datasets-dir datasets",
    ),
    "mup": (
        "mup.py check wide --widths 32,64 --steps 4 --learning-rate 0.01 --seeds 2"
        " --chart check.png --datasets-dir datasets",
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
FROM_THE_HUB = (
    f"download_dataset.py {DATASET} --config small --split train --revision main --vocab-size 300"
    " --name from-a-config --datasets-dir datasets",
    f"download_dataset.py {DATASET} --files data/train-* --tokenizer datasets/words"
    " --name from-files --datasets-dir datasets",
    f"pretrained.py import {HUB_MODEL} imported --revision main",
)
TO_THE_HUB = (
    "pretrained.py upload run me/tiny --public --weights ema --datasets-dir datasets --gguf f16",
)
LONGER = (
    ("train.json", {"min_train_tokens": 4_096}, "train.py run --extend --datasets-dir datasets"),
    ("reinforce.json", {"steps": 5}, "reinforce.py rl --extend --trust-verifier"),
)
"""Edits of a finished run, and the command that goes on with it."""
VERDICTS = ("mup.py check", "train.py failing --datasets-dir datasets --replay")
"""Commands whose exit code may be 1: activations depend on the width in so few steps of so narrow
models, and a replayed step is not finite."""
FAILING = (
    "train.py failing --like run --set learning_rate=1e30 --set max_non_finite_steps=99"
    " --datasets-dir datasets"
)
REPLAY = "train.py failing --datasets-dir datasets --replay"
WATCH = "charts.py run --watch --port 0"
SERVE = (
    "serve.py run --host 127.0.0.1 --port 0 --key-file key.txt --rows 2 --most-waiting 3"
    " --most-tokens 9 --most-seconds 30 --follow --chat-template chat.jinja --dtype bfloat16"
    " --weights int8"
)
SERVERS = {WATCH: "", SERVE: "v1/models"}
"""Commands that serve until a signal, and a page of each."""
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "needs PyTorch; with recorded values in tests/commands/test_pretrained.py": (
        "pretrained.py import --check",
        "pretrained.py import --python",
    ),
    "needs a checkpoint of Linen; as a command in tests/linen/test_importing.py": (
        "pretrained.py import --linen",
    ),
    "needs the compiler of an accelerator; with its answers in tests/planning/compiled": (
        "plan.py --compile",
        "plan.py --roofline",
    ),
    "needs the extra eval; in Python in tests/evaluation/test_harness.py": (
        *(f"evaluate.py --{name}" for name in ("tasks", "task-files", "few-shot")),
    ),
}
"""Options that no command above gives, by where they are tried or why they can't be."""


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}


def run(line: str, folder: Path, **variables: str) -> None:
    script, *words = shlex.split(line)
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *words],
        cwd=folder,
        env=environment() | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    allowed = (0, 1) if line.startswith(VERDICTS) else (0,)
    assert done.returncode in allowed, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr, f"{line}\n{done.stderr[-2000:]}"


def write_lines(path: Path, rows: list[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder: Path, model: dict[str, Any], **files: dict[str, Any]) -> None:
    folder.mkdir()
    for name, content in {"model": model, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was trained, and files of each kind that commands read."""
    place = tmp_path_factory.mktemp("every_option")
    (place / "words.txt").write_text("".join(f"{n} {TEXT}" for n in range(100)))
    write_lines(place / "pairs.jsonl", [{"prompt": f"{n}:", "answer": "a"} for n in range(40)])
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    write_lines(place / "chats.jsonl", [{"messages": chat, "id": n} for n in range(40)])
    pair = {"chosen": "a dog", "rejected": "a fox"}
    write_lines(place / "prefs.jsonl", [pair | {"prompt": f"{n}:"} for n in range(40)])
    write_lines(place / "documents.jsonl", [{"body": f"{n} {TEXT}"} for n in range(100)])
    item = {"prompt": "The", "choices": [" fox", " dog"], "answer": 0}
    write_lines(place / "items.jsonl", [item] * 4)
    (place / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    ids = np.arange(5_000, dtype="<u2") % 250
    (place / "train.bin").write_bytes(ids.tobytes())
    np.save(place / "val.npy", ids[:500])
    (place / "documents.parquet").write_bytes(parquet(body=[f"{n} {TEXT}" for n in range(100)]))
    write_run(place / "run", MODEL, train=TRAIN | {"ema_decay": 0.9})
    write_run(place / "wide", MODEL | {"mup": {"base_emb_dim": 32}}, train=TRAIN)
    parity = {"dataset": "parity-pairs", "sample_prompts": []}
    write_run(place / "parity", MODEL | PARITY, train=TRAIN | parity)
    write_run(place / "rl", MODEL | PARITY, reinforce=REINFORCE)
    (place / "rl/reward.py").write_text(REWARD)
    publish(place / "published")
    change(place / "published/config.json", odd=1)
    for line in SETUP:
        run(line, place)
    return place


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_run(name: str, folder: Path) -> None:
    for line in COMMANDS[name]:
        if line.startswith("train.py runs/tuned"):
            (folder / "runs/tuned/train.json").write_text(json.dumps(TRAIN | TUNING))
        run(line, folder)


@pytest.mark.long
def test_commands_that_read_from_the_hub_run(folder: Path) -> None:
    with HubStandIn() as hub:
        files = [{"split": "train", "path": "data/train-*"}]
        hub.card = {"configs": [{"config_name": "small", "data_files": files}]}
        hub.files["data/train-0.parquet"] = parquet(text=[f"{n} {TEXT}" for n in range(100)])
        for path in (folder / "published").iterdir():
            hub.files[path.name] = path.read_bytes()
        hub.files["config.json"] = hub.files["config.json"].replace(b'"odd": 1', b'"use_cache": 1')
        for line in FROM_THE_HUB:
            run(line, folder, HF_ENDPOINT=hub.address, HF_HUB_DISABLE_XET="1")


@pytest.mark.long
def test_commands_that_write_to_the_hub_run(folder: Path) -> None:
    with WritableHub() as hub:
        variables = {"HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
        for line in TO_THE_HUB:
            run(line, folder, HF_ENDPOINT=hub.address, **variables)
        assert "model.safetensors" in hub.repositories["me/tiny"]
        assert not hub.private


@pytest.mark.long
def test_finished_runs_go_on(folder: Path) -> None:
    for line in COMMANDS["reinforce"][:2]:
        run(line, folder)
    for file, keys, line in LONGER:
        change(folder / line.split()[1] / file, **keys)
        run(line, folder)


@pytest.mark.long
def test_a_failed_step_is_replayed(folder: Path) -> None:
    run(FAILING, folder)
    step = min((folder / "runs/failing/failed-steps").iterdir()).name
    run(f"{REPLAY} {step}", folder)


@pytest.mark.long
@pytest.mark.parametrize("line", SERVERS)
def test_servers_answer(line: str, folder: Path) -> None:
    (folder / "key.txt").write_text("a key that nobody has")
    script, *words = shlex.split(line)
    with subprocess.Popen(
        [sys.executable, str(ROOT / script), *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        shown = next(line for line in process.stdout if "http://" in line)
        address = next(word for word in shown.split() if word.startswith("http://"))
        headers = {"Authorization": "Bearer a key that nobody has"}
        asked = urllib.request.Request(address + SERVERS[line], headers=headers)
        with urllib.request.urlopen(asked) as page:
            assert page.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)


def test_every_option_is_given() -> None:
    lines = [*SETUP, *FROM_THE_HUB, *TO_THE_HUB, FAILING, f"{REPLAY} step-000001", *SERVERS]
    lines += [line for lines in COMMANDS.values() for line in lines]
    lines += [line for *_, line in LONGER]
    given = set().union(*(given_options(*shlex.split(line)) for line in lines))
    listed = {
        (command, option)
        for options in ELSEWHERE.values()
        for command, _, option in (text.rpartition(" ") for text in options)
    }
    assert given | listed == all_options()
    assert not given & listed, "given after all"
