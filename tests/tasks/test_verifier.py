"""Opening verifiers: trust, files, and what a config chooses."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from rungs.common.errors import UserError
from rungs.config.reinforce_config import TaskConfig
from rungs.tasks.catalog import open_task
from rungs.tasks.checkup import check
from rungs.tasks.task import Item
from rungs.tasks.verifier import Verifier, open_verifier

REWARD = """
def reward(prompt, completion, answer, info):
    return {"correct": completion.endswith("=" + answer), "bits": info["bits"].count("1") / 100}
"""


def opened(folder: Path, trust: bool = False, **keys: Any) -> Verifier:
    config = TaskConfig(**{"source": "parity"} | keys)
    return open_verifier(config, open_task(config, folder), folder, trust_verifier=trust)


def test_a_file_needs_trust_and_is_not_run_without(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "reward.py").write_text(f"open({str(ran)!r}, 'w')\n{REWARD}")
    with pytest.raises(UserError, match=rf"^{tmp_path}/reward.py: .* give --trust-verifier$"):
        opened(tmp_path, verifier="reward.py")
    assert not ran.exists()
    with opened(tmp_path, trust=True, verifier="reward.py"):
        pass
    assert ran.exists()


def test_a_files_verifier_and_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(REWARD)
    config = TaskConfig(source="parity", verifier="reward.py")
    task = open_task(config, tmp_path)
    with open_verifier(config, task, tmp_path, trust_verifier=True) as verifier:
        path.write_text("changed while the run goes on")
        assert verifier.sha256 == hashlib.sha256(REWARD.encode()).hexdigest()
        item = task.train[0]
        verdict = verifier(item, task.worked(item))
        assert verdict.correct
        assert verdict.rewards == {"correct": 1, "bits": item.info["bits"].count("1") / 100}
        assert not verifier(item, "").correct
        assert check(verifier, task).items == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def reward(:",
            "^reward.py: SyntaxError: .*; correct the file, so that it defines reward",
        ),
        ("", "^reward.py: TypeError: has no function reward"),
        (None, "reward.py: no such file"),
    ],
)
def test_a_file_without_a_reward_function(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "reward.py").write_text(text)
    with pytest.raises(UserError, match=message):
        opened(tmp_path, trust=True, verifier="reward.py")


def test_a_config_without_a_verifier_has_the_tasks_own(tmp_path: Path) -> None:
    verifier = opened(tmp_path)
    assert (verifier.name, verifier.sha256) == ("parity", None)
    assert opened(tmp_path, source="sort").name == "sorted"
    assert opened(tmp_path, source="sort", verifier="exact").name == "exact"


def test_a_verifier_that_does_not_fit_the_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^verifier: countdown does not fit the items of parity: info"
    ):
        opened(tmp_path, verifier="countdown")


def test_each_item_of_a_file_has_its_own_verifier(tmp_path: Path) -> None:
    lines = [
        {"prompt": "p", "answer": "7", "verifier": "exact"},
        {"prompt": "q", "answer": "7", "verifier": "gsm8k"},
        {"prompt": "r", "answer": "7", "verifier": "last_number"},
    ]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = TaskConfig(source="items.jsonl", validation_items=1)
    task = open_task(config, tmp_path)
    items = {item.verifier: item for item in [*task.validation, task.train[0], task.train[1]]}
    with open_verifier(config, task, tmp_path, trust_verifier=False) as verifier:
        found = {
            text: {name for name, item in items.items() if verifier(item, text).correct}
            for text in ("7", "#### 7", "It is 7.")
        }
    assert found == {
        "7": {"exact", "last_number"},
        "#### 7": {"gsm8k", "last_number"},
        "It is 7.": {"last_number"},
    }


def test_limits_come_from_the_config(tmp_path: Path) -> None:
    body = (
        "    while completion == 'hang': pass\n    x = bytearray(2**28 * (completion == 'eat'))\n"
    )
    (tmp_path / "reward.py").write_text(
        f"def reward(prompt, completion, answer, info):\n{body}    return 1"
    )
    limits = {"verifier_timeout_seconds": 0.5, "verifier_memory_bytes": 2**27}
    with opened(tmp_path, trust=True, verifier="reward.py", **limits) as verifier:
        item = Item("p", "a")
        statuses = [verifier(item, text).status for text in ("hang", "eat", "")]
    assert statuses == ["timeout", "out_of_memory", "ok"]


def test_the_name_says_what_the_items_name(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{name}", "answer": "7", "verifier": "gsm8k"}}' for name in "abc"]
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    config = TaskConfig(source="items.jsonl", validation_items=1)
    task = open_task(config, tmp_path)
    with open_verifier(config, task, tmp_path, trust_verifier=False) as verifier:
        assert verifier.name == "gsm8k"
