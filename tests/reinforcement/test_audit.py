"""The audit finds what a verifier pays for."""

import dataclasses
from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.reinforcement.audit import audit
from rungs.reinforcement.rollout_files import Completion, RolloutFiles
from rungs.run.folder import RunFolder
from tests.support.policy_steps import step

RIGHT = Completion(
    task=0,
    prompt="01:",
    place=0,
    sample=0,
    text="=1",
    tokens=[1, 2, 0],
    log_probs=[-1.0, -1.0, -1.0],
    finished=True,
    answer="1",
    rewards={"correct": 1.0},
    correct=True,
    status="ok",
    message="",
    advantage=0.0,
)
WRONG = dataclasses.replace(RIGHT, text="=0", rewards={"correct": 0.0}, correct=False)
OTHER = dataclasses.replace(WRONG, prompt="00:", place=1, answer="0", text="=1")
TRICK = dataclasses.replace(
    WRONG, text="please", tokens=[1] * 6, rewards={"correct": 0.0, "polite": 0.9}
)


def write(folder: Path, *steps: list[Completion]) -> RunFolder:
    files = RolloutFiles(folder / "rollouts")
    folder.mkdir()
    for number, completions in enumerate(steps):
        files.write(files.step(number), completions)
    return RunFolder(folder)


def test_an_honest_run_looks_honest(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [RIGHT, WRONG, OTHER], [RIGHT, RIGHT, OTHER, OTHER])
    text = audit(run)
    assert "texts of steps 0 to 0 and 1 to 1" in text
    assert "Nothing looks suspicious." not in text  # every text is "=1"
    assert '! "=1" is 100% of all texts, whatever the prompt.' in text
    assert text.count("!") == 1


def test_a_paid_trick_is_found(tmp_path: Path) -> None:
    other = dataclasses.replace(TRICK, prompt="00:", place=1, answer="0", text="please do")
    cut = dataclasses.replace(other, finished=False, text="pretty please")
    run = write(tmp_path / "run", [RIGHT, WRONG], [RIGHT, WRONG], [TRICK, other, cut, TRICK])
    text = audit(run)
    assert "texts of steps 0 to 1 and 1 to 2" in text
    assert "reward polite" in text
    assert '0.9 for "please" to "01:"' in text
    assert "share of texts that are correct changed by" in text
    assert "share of texts that end with the answer changed by" not in text  # says the same
    assert "share of texts that are cut off at max_new_tokens changed by" in text
    assert "which may be chance" in text


def test_texts_are_not_compared_with_answers_that_items_lack(tmp_path: Path) -> None:
    right, wrong = (dataclasses.replace(one, answer="") for one in (RIGHT, WRONG))
    assert "the answer" not in audit(write(tmp_path / "none", [right, wrong], [right, wrong]))
    assert "ends with the answer" in audit(write(tmp_path / "some", [right, WRONG], [RIGHT, wrong]))


def test_a_change_has_an_interval_over_prompts(tmp_path: Path) -> None:
    def texts(paid: int) -> list[Completion]:
        prompts = [dataclasses.replace(WRONG, prompt=str(place), place=place) for place in range(8)]
        return [
            dataclasses.replace(one, rewards={"polite": float(one.place < paid)})
            for one in prompts
            for _ in range(4)
        ]

    text = audit(write(tmp_path / "certain", texts(0), texts(6)))
    assert "The reward changed by +0.75 (± 0.32), but" in text  # 1.96 · √(8/7 · ¾ · ¼ ÷ 8)
    text = audit(write(tmp_path / "chance", texts(1), texts(2)))
    assert "The reward changed by +0.12 (± 0.40, which may be chance), but" in text


def test_texts_of_steps_that_the_run_went_back_behind_are_left_out(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [RIGHT, WRONG], [RIGHT, WRONG], [TRICK, TRICK])
    run.metrics.write_text("".join(step(number).as_line() for number in range(2)))
    text = audit(run)
    assert "texts of steps 0 to 0 and 1 to 1" in text
    assert "polite" not in text


def test_texts_without_a_reward_are_left_out(tmp_path: Path) -> None:
    failed = dataclasses.replace(WRONG, status="error", rewards={})
    run = write(tmp_path / "run", [RIGHT, failed], [failed, failed])
    with pytest.raises(UserError, match="no text of it has a reward"):
        audit(run)
    text = audit(write(tmp_path / "some", [RIGHT, WRONG], [RIGHT, WRONG, OTHER, failed]))
    assert "! 25% of the latest texts are left out" in text


def test_without_texts_there_is_nothing_to_audit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no texts yet"):
        audit(RunFolder(tmp_path))
    run = write(tmp_path / "run", [RIGHT])
    RolloutFiles(run.rollouts).step(0).write_text("{}\n")
    with pytest.raises(UserError, match=r"step-000000\.jsonl: damaged"):
        audit(run)
