"""The pages in `docs/tasks` do what they say: their files are written and their commands run, in a
copy of the checkout whose runs are short."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.committed_runs import COMMITTED_RUNS, REINFORCEMENT_RUNS, ROOT

PAGES, FIXTURES = ROOT / "docs" / "tasks", ROOT / "tests" / "fixtures"
PART = re.compile(
    r"(?:`(?P<json>[\w/.-]+\.jsonl?)`[^`\n]*:\n\n)?"
    r"^```(?P<kind>\w+)\n(?P<text>(?:# (?P<code>[\w/.-]+\.(?:py|toml))\n)?.*?)^```",
    re.MULTILINE | re.DOTALL,
)
"""A code block. A file's name is in its first line or, for JSON, in the sentence before it."""
SHORT = {
    "train.json": {"min_train_tokens": 16_384, "validation_tokens": 2_048},
    "reinforce.json": {"steps": 2, "prompts_per_step": 8, "validation_samples": 2},
}
"""Keys of runs in the tests."""
IS_SHORT = "epochs"
"""In a train.json that goes through a short dataset."""
CHATS = 400
"""In a file of chats, of which the page shows one."""
PUBLISHED = "Qwen/Qwen2.5-0.5B-Instruct"
ONLY_READ = {"add-a-layer", "add-a-metric"}
"""Pages whose commands are tests and checks that run anyway, after changes to the code."""

UV = """#!{python}
import os, subprocess, sys

arguments = sys.argv[1:]
assert arguments.pop(0) == "run"
while arguments[0] == "--with-editable":
    package, arguments = arguments[1], arguments[2:]
    target = os.path.abspath("installed")
    install = ["{uv}", "pip", "install", "-q", "--offline", "--python", "{python}"]
    subprocess.run([*install, "--target", target, package], check=True)
    os.environ["PYTHONPATH"] = target
os.execv("{python}", ["{python}", *arguments])
"""
"""In place of uv, which would make another environment."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The commands with the package and short runs."""
    for script in ROOT.glob("*.py"):
        shutil.copy(script, tmp_path)
    for name in ("rungs", "schemas", "smoke_tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for file in [f for run in (*COMMITTED_RUNS, *REINFORCEMENT_RUNS) for f in run.glob("*.json")]:
        write(tmp_path / file.relative_to(ROOT), file.read_text(encoding="utf-8"))
    model = json.loads((ROOT / "runs/layers/model.json").read_text())
    write(tmp_path / "runs/layers/model.json", json.dumps(model | {"emb_dim": 32}))
    (tmp_path / "books").mkdir()
    for page in ROOT.glob("docs/*.md"):
        shutil.copy(page, tmp_path / "books" / f"{page.stem}.txt")
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV.format(python=sys.executable, uv=shutil.which("uv")))
    uv.chmod(0o755)
    return tmp_path


def write(path: Path, text: str) -> None:
    """Write a file of a page or of a committed run, in which there is less to do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        text *= CHATS
    elif path.name in SHORT and IS_SHORT not in text:
        text = json.dumps(json.loads(text) | SHORT[path.name])
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


@pytest.mark.long
@pytest.mark.parametrize(
    "page", [p for p in sorted(PAGES.glob("*.md")) if p.stem not in ONLY_READ], ids=lambda p: p.stem
)
def test_commands_run(page: Path, checkout: Path) -> None:
    text = page.read_text(encoding="utf-8").replace(PUBLISHED, "published")
    publish(checkout / "published")
    commands = 0
    for part in PART.finditer(text):
        if name := part["json"] or part["code"]:
            write(checkout / name, part["text"])
        elif part["kind"] == "sh":
            commands += 1
            run(part["text"], checkout)
    assert commands


def run(commands: str, checkout: Path) -> None:
    """Run the commands of a block, without those for a GPU."""
    lines = [line for line in commands.splitlines() if "--extra cuda" not in line]
    done = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        cwd=checkout,
        env=os.environ | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
