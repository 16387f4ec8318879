"""From examples of one's own task to a tokenizer, a start model and a policy, as documented."""

import json
import re
from pathlib import Path

import pytest

from rungs.checkpointing.load import load_tokenizer
from rungs.run import metrics
from rungs.run.metrics import PolicyMetrics
from tests.support.commands import run_script
from tests.support.committed_runs import ROOT
from tests.support.tiny_reinforcement import MODEL, REINFORCE


@pytest.mark.long
def test_the_documented_commands_lead_from_examples_to_a_policy(tmp_path: Path) -> None:
    words = [f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]
    lines = [json.dumps({"prompt": f"{word}: ", "answer": word[::-1]}) + "\n" for word in words]
    start, run, place = tmp_path / "start", tmp_path / "run", tmp_path / "datasets"
    for folder in (start, run):
        folder.mkdir()
        (folder / "model.json").write_text(json.dumps(MODEL | {"vocab_size": 257}))
    (tmp_path / "examples.jsonl").write_text("".join(lines[:40]))
    (run / "words.jsonl").write_text("".join(lines[40:]))
    page = (ROOT / "docs/reinforcement.md").read_text()
    documented = re.search(r"(\{\s+\"dataset\": \"examples\".*?\})\n```", page, re.DOTALL)
    assert documented
    small = {"validation_tokens": 16, "microbatch_size": 4, "checkpoint_interval": 5}
    (start / "train.json").write_text(json.dumps(json.loads(documented[1]) | small))
    task = {"source": "words.jsonl", "verifier": "exact", "validation_items": 4}
    reinforce = REINFORCE | {"start_from": str(start), "tasks": [task], "steps": 2}
    (run / "reinforce.json").write_text(json.dumps(reinforce))
    named = ("--name", "examples", "--vocab-size", 257, "--datasets-dir", place)
    for command in (
        ("download_dataset.py", "--pairs", tmp_path / "examples.jsonl", *named),
        ("train.py", start, "--datasets-dir", place),
        ("reinforce.py", run),
    ):
        result = run_script(*command)
        assert result.returncode == 0, result.stderr
    assert load_tokenizer(run).vocab_size == 257
    assert len(list(metrics.stream(run / "metrics.jsonl", PolicyMetrics))) == 2
