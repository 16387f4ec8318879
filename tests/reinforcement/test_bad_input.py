"""Bad tasks and verifiers end a start with one line and change nothing on disk."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rungs.common.errors import UserError
from rungs.config.run_config import load_any_run, load_reinforcement_run, load_run
from tests.support.commands import run_script
from tests.support.tiny_reinforcement import make_reinforcement_run, reinforce, write_start

GOOD = '{"prompt": "1:", "answer": "1"}\n{"prompt": "0:", "answer": "0"}\n'
VERIFIER = "def reward(prompt, completion, answer, info):\n    "
RIGHT = "float(completion == answer)"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start") / "weights")


@pytest.mark.parametrize(
    ("items", "verifier", "message"),
    [
        ("", None, "has no items"),
        ('{"prompt": "1:"}\n', None, r"items\.jsonl:1: answer: missing"),
        ('{"prompt": "1:", "answer": "1"}\n', None, "leaves none to train on"),
        ('{"prompt": "", "answer": "1"}\n' + GOOD, None, r"items\.jsonl:1: prompt"),
        (GOOD.replace("1:", "1" * 11 + ":"), None, "it must have 1 to 10"),
        (GOOD.replace("1:", "1é?:"), None, '"1é[?]:": the tokenizer has no tokens for "é" "[?]"'),
        (GOOD, VERIFIER + "raise KeyError(answer)\n", "KeyError"),
        (GOOD, VERIFIER + "return 0.0\n", "pays 0 for the right answer"),
        (GOOD, VERIFIER + "return 1.0\n", "pays 1 for an empty text"),
        (GOOD, VERIFIER + "return float(answer in completion)\n", "pays 1 for the prompt itself"),
        (GOOD, VERIFIER + "while True: pass\n", "longer than 0.3 s"),
        (GOOD, VERIFIER + f"import random; return {RIGHT} + random.random()\n", "second time"),
    ],
)
def test_a_start_is_refused(
    items: str, verifier: str | None, message: str, start: Path, tmp_path: Path
) -> None:
    task: dict[str, Any] = {"source": "items.jsonl", "validation_items": 1, "verifier": "exact"}
    if verifier is not None:
        task |= {"verifier": "reward.py", "verifier_timeout_seconds": 0.3}
    run = make_reinforcement_run(tmp_path / "run", start, tasks=[task])
    (run.path / "items.jsonl").write_text(items)
    if verifier is not None:
        (run.path / "reward.py").write_text(verifier)
    before = sorted(run.path.iterdir())
    with pytest.raises(UserError, match=message):
        reinforce(run, trust_verifier=True)
    assert sorted(run.path.iterdir()) == before


@pytest.mark.long
def test_steps_without_a_correct_completion_are_warned_of(
    start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are longer than completions can be."""
    monkeypatch.setattr(logging.getLogger("rungs"), "propagate", True)
    task = {"source": "items.jsonl", "validation_items": 1, "verifier": "exact"}
    run = make_reinforcement_run(tmp_path / "run", start, tasks=[task])
    (run.path / "items.jsonl").write_text(
        GOOD.replace('"1"', '"1111111"').replace('"0"', '"000000000"')
    )
    assert reinforce(run) == 0
    assert caplog.text.count("5 steps in a row without a correct completion") == 1


def test_shared_items_are_refused(start: Path, tmp_path: Path) -> None:
    task = {"source": "items.jsonl", "validation_source": "held.jsonl", "verifier": "exact"}
    run = make_reinforcement_run(tmp_path / "run", start, tasks=[task])
    (run.path / "items.jsonl").write_text(GOOD)
    (run.path / "held.jsonl").write_text(GOOD)
    with pytest.raises(UserError, match=r"its prompt is also in .*items\.jsonl:1"):
        reinforce(run)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_new_tokens": 16}, "max_new_tokens: 16 leaves no room"),
        ({"microbatch_size": 3}, "microbatch_size: 3 does not divide the 16 completions"),
        ({"reference": "x"}, "reference: needs a kl_coefficient above 0"),
        ({"advantage": "none"}, 'advantage: "none" needs a teacher'),
        ({"loss": "gspo", "updates_per_rollout": 2}, "clip_low: needed by loss"),
        ({"samples_per_prompt": 1}, "samples_per_prompt"),
        ({"temperature": 0}, "temperature"),
        ({"tasks": []}, "tasks"),
        ({"tasks": [{"source": "parrity"}]}, "did you mean"),
        ({"tasks": [{"source": "parity", "settings": {"bits": 3}}]}, "bits"),
        ({"sharding": {"mode": "tp", "tensor": 2}}, 'sharding.mode: "tp" is not supported'),
        ({"skip_spikes": True}, "skip_spikes"),
        ({"dataset": "x"}, "dataset"),
        ({"drop_rate": 0.1}, "drop_rate"),
    ],
)
def test_keys_that_do_not_fit_are_named(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = make_reinforcement_run(tmp_path / "run", tmp_path / "start", **keys)
    with pytest.raises(UserError, match=message) as raised:
        load_reinforcement_run(run.path)
    assert "reinforce.json: " in str(raised.value)


def test_each_command_names_the_other(tmp_path: Path) -> None:
    run = make_reinforcement_run(tmp_path / "run", tmp_path / "start")
    with pytest.raises(UserError, match=r"uv run reinforce\.py"):
        load_run(run.path)
    assert load_any_run(run.path).train_file == "reinforce.json"
    train = {"dataset": "x", "microbatch_size": 1, "learning_rate": 1.0, "checkpoint_interval": 1}
    (run.path / "train.json").write_text(json.dumps(train))
    for load in (load_run, load_reinforcement_run, load_any_run):
        with pytest.raises(UserError, match=r"has both train\.json and reinforce\.json"):
            load(run.path)
    (run.path / "reinforce.json").unlink()
    with pytest.raises(UserError, match=r"uv run train\.py"):
        load_reinforcement_run(run.path)


def test_an_audit_takes_no_option_of_a_start(start: Path, tmp_path: Path) -> None:
    run = make_reinforcement_run(tmp_path / "run", start)
    finished = run_script("reinforce.py", run.path, "--audit", "--fresh")
    assert finished.returncode == 2
    assert "it goes with no other option" in finished.stderr
