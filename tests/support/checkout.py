"""A copy of the checkout, whose runs are short, in which documented commands run as they are
written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.committed_runs import COMMITTED_RUNS, REINFORCEMENT_RUNS, ROOT

FIXTURES = ROOT / "tests" / "fixtures"
SHORT = {
    "train.json": {"min_train_tokens": 8_192, "validation_tokens": 512},
    "reinforce.json": {"steps": 2, "prompts_per_step": 8, "validation_samples": 2},
}
"""Keys of runs in the tests."""
CONTEXTS = {128: 32}
"""Lengths of models, and those that they have in the tests."""
FEWER: dict[str, Any] = {
    "budget": {"steps": 6},
    "grid": {"learning_rate": [0.003, 0.01]},
    "seeds": 2,
    "budgets": [3e10, 5e10],
    "predict": 8e10,
}
"""Keys that an experiment.json may have, in place of larger values."""
LARGER_MICROBATCH = 64
"""Of experiments that set one: fewer steps for as many tokens."""
SEVERAL_EPOCHS = {"max_steps": 16}
"""Keys of a train.json that goes through its data more than once."""
CHATS = 400
"""In a file of chats or pairs, of which a page shows a few."""

UV = """#!{python}
import os, subprocess, sys

arguments = sys.argv[1:]
assert arguments.pop(0) == "run"
while arguments[0].startswith("--"):
    option, value, *arguments = arguments
    assert option in ("--extra", "--with-editable"), option
    if option == "--with-editable":
        target = os.path.abspath("installed")
        install = ["{uv}", "pip", "install", "-q", "--offline", "--python", "{python}"]
        subprocess.run([*install, "--target", target, value], check=True)
        os.environ["PYTHONPATH"] = target
if arguments[0] == "python":
    arguments.pop(0)
elif arguments[0] == "rungs":
    arguments.insert(0, "-m")
os.execv("{python}", ["{python}", *arguments])
"""
"""In place of uv, which would make another environment. Extras are left out: what needs a GPU's
runs on the CPU."""


def make_checkout(folder: Path) -> None:
    """Fill a folder with the commands, the package, short runs and texts."""
    for script in ROOT.glob("*.py"):
        shutil.copy(script, folder)
    for name in ("rungs", "schemas", "smoke_tests", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    files = [f for run in (*COMMITTED_RUNS, *REINFORCEMENT_RUNS) for f in run.glob("*.[jp]*")]
    for file in [f for f in files if f.suffix in (".json", ".py")]:
        write(folder / file.relative_to(ROOT), file.read_text(encoding="utf-8"))
    for file in ROOT.glob("experiments/*/experiment.json"):
        write(folder / file.relative_to(ROOT), file.read_text(encoding="utf-8"))
    for name in ("layers", "mup"):
        model = folder / "runs" / name / "model.json"
        model.write_text(json.dumps(json.loads(model.read_text()) | {"emb_dim": 32}))
    (folder / "books").mkdir()
    for name in ("models", "training", "planning"):
        shutil.copy(ROOT / "docs" / f"{name}.md", folder / "books" / f"{name}.txt")
    uv = folder / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV.format(python=sys.executable, uv=shutil.which("uv")))
    uv.chmod(0o755)


def write(path: Path, text: str) -> None:
    """Write a file of a page or of a committed run, in which there is less to do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        text *= CHATS
    elif path.name == "experiment.json":
        content = {key: FEWER.get(key, value) for key, value in json.loads(text).items()}
        if "microbatch_size" in content.get("changes", {}):
            content["changes"]["microbatch_size"] = LARGER_MICROBATCH
        text = json.dumps(content)
    elif path.name == "model.json":
        content = json.loads(text)
        length = content["context_length"]
        text = json.dumps(content | {"context_length": CONTEXTS.get(length, length)})
    elif path.name in SHORT:
        content = json.loads(text)
        text = json.dumps(content | (SEVERAL_EPOCHS if "epochs" in content else SHORT[path.name]))
    path.write_text(text, encoding="utf-8")


def publish(folder: Path) -> None:
    """Write a tiny model with random weights, a tokenizer and a chat template, as a hub has."""
    models, tokenizers = FIXTURES / "models" / "qwen2", FIXTURES / "tokenizers" / "qwen"
    shutil.copytree(tokenizers, folder)
    shutil.copy(models / "generation_config.json", folder)
    config = json.loads((models / "config.json").read_text())
    config |= {"vocab_size": 603, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(models / "model.safetensors")
    embedding = np.random.default_rng(0).normal(0, 0.02, (603, config["hidden_size"]))
    weights["model.embed_tokens.weight"] = embedding.astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    chats = json.loads((FIXTURES / "chats.json").read_text(encoding="utf-8"))
    (folder / "chat_template.jinja").write_text(chats[0]["source"])


def run_shell(commands: str, checkout: Path) -> str:
    """Run lines of a shell in the checkout; return what is wrong, empty if nothing is."""
    path = {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=checkout,
        env=os.environ | path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0 and "Traceback" not in done.stderr:
        return ""
    return f"{commands}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
