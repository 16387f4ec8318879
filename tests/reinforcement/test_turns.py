"""Completions with turns: only what the model wrote is learned, the record has every reply, and
nothing that is recorded is asked again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import load_reinforcement_run
from rungs.data.tokens.sequences import IGNORED
from rungs.reinforcement.environment_check import check_environment
from rungs.reinforcement.policy_learner import reinforcement
from rungs.reinforcement.policy_update import PolicyBatch, PolicyUpdater, advantages_of_turns
from rungs.reinforcement.rerun import replay
from rungs.reinforcement.rollout_files import Completion, RolloutFiles, Turn, read
from rungs.report.page_data import ShownRun, _shown_completions
from rungs.run.folder import RunFolder
from rungs.run.step_table import StepTable
from rungs.tasks.environment import Environment
from tests.reinforcement.test_start import Killed, assert_same_end, kill_in
from tests.support.tiny_reinforcement import reinforce, steps_of, write_start
from tests.support.turns import ENVIRONMENT, UNREPEATABLE, make_run_with_turns

KIND = reinforcement(trust_verifier=True)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start") / "weights")


@pytest.fixture(scope="module")
def whole(start: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finished(make_run_with_turns(tmp_path_factory.mktemp("whole") / "run", start))


@pytest.fixture(scope="module")
def unrepeatable(start: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("unrepeatable") / "run"
    return finished(make_run_with_turns(folder, start, UNREPEATABLE))


def finished(run: RunFolder) -> RunFolder:
    assert reinforce(run, trust_verifier=True) == 0
    return run


def completions_of(run: RunFolder) -> list[Completion]:
    files = RolloutFiles(run.rollouts)
    return [one for step in steps_of(run) for one in read(files.step(step.global_step))]


def test_the_record_has_every_turn(whole: RunFolder) -> None:
    completions = completions_of(whole)
    turns = [turn for completion in completions for turn in completion.turns]
    assert {len(completion.turns) for completion in completions} >= {2, 3}
    assert {turn.reply for turn in turns} <= {"0:", "1:"}
    for completion in completions:
        assert completion.text == "".join(turn.wrote + turn.reply for turn in completion.turns)
        assert len(completion.log_probs) == len(completion.tokens) <= 10
        assert (np.array(completion.log_probs)[~completion.is_written] == 0).all()
        assert (np.array(completion.log_probs)[completion.is_written] < 0).all()
        bits = {turn.reply[0] for turn in completion.turns}
        assert len(bits) == 1  # the group's seed
        total = sum(turn.rewards["length"] for turn in completion.turns)
        assert completion.rewards["length"] == pytest.approx(total)
        ended = completion.turns[-1].over
        assert completion.finished is ended or len(completion.tokens) + 2 >= 10  # no room for more
    for step in steps_of(whole):
        assert step.mean_turns > 1


def test_the_page_tells_replies_apart(whole: RunFolder) -> None:
    steps = StepTable(whole.metrics)
    shown = ShownRun("whole", whole, load_reinforcement_run(whole.path), steps)
    shown.refresh()
    samples = [*shown._completions()]
    assert {(one["step"], one["kind"]) for one in samples} >= {(0, "best"), (0, "worst")}
    for one in samples:
        assert "".join(wrote + reply for wrote, reply in one["turns"]) == one["text"]
        assert {reply for _, reply in one["turns"]} <= {"0:", "1:"}


def test_the_page_tells_items_with_the_same_prompt_apart(whole: RunFolder, tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path)
    one = read(RolloutFiles(whole.rollouts).validation(2))[0]
    prompts = ["a", "b", "a"]
    completions = [
        dataclasses.replace(one, place=place, prompt=prompt) for place, prompt in enumerate(prompts)
    ]
    files.write(files.validation(2), completions)
    items = [shown["item"] for shown in _shown_completions(2, files.validation(2), 0)]
    assert items == ["a (item 1)"] * 2 + ["b"] * 2 + ["a (item 3)"] * 2


def test_log_probs_are_those_of_one_pass_over_the_whole_text(whole: RunFolder) -> None:
    """Training computes them so, without a cache, also of tokens after replies."""
    for step in steps_of(whole):
        assert step.largest_log_prob_gap < 1e-5


def test_replies_have_no_weight() -> None:
    turns = [
        Turn("ab", 2, "c", [7, 8], {}, False, "ok", ""),
        Turn("d", 5, "", [], {}, True, "ok", ""),
    ]
    keys: dict[str, Any] = dict.fromkeys(("prompt", "text", "answer", "message"), "")
    keys |= {"task": 0, "place": 0, "sample": 0, "finished": True, "correct": True, "status": "ok"}
    completion = Completion(
        **keys,
        tokens=[5, 6, 7, 8, 9],
        log_probs=[-1.0, -2.0, 0.0, 0.0, -3.0],
        rewards={},
        turns=turns,
    )
    batch = PolicyBatch.of([[3, 4]], [completion], 8, np.array([True]))
    assert batch.inputs_NS.tolist() == [[3, 4, 5, 6, 7, 8, 9, 0]]
    no = IGNORED
    assert batch.targets_NS.tolist() == [[no, 5, 6, no, no, 9, no, no]]
    assert batch.sampler_log_probs_NS.tolist() == [[0, -1, -2, 0, 0, -3, 0, 0]]
    assert batch.per_token(np.array([0.5])).tolist() == [[0, 0.5, 0.5, 0, 0, 0.5, 0, 0]]
    assert completion.written_tokens == 3


def with_turns(rewards: list[float], status: str = "ok") -> Completion:
    """Return a completion with a token, a reward and a reply of a token in each turn."""
    turns = [
        Turn("a", 2 * number + 1, "b", [9], {"x": reward}, False, "ok", "")
        for number, reward in enumerate(rewards)
    ]
    keys: dict[str, Any] = dict.fromkeys(("prompt", "text", "answer", "message"), "")
    keys |= {"task": 0, "place": 0, "sample": 0, "finished": True, "correct": True}
    tokens = [5, 9] * len(rewards)
    return Completion(
        **keys,
        tokens=tokens[:-1],
        log_probs=[-1.0] * (len(tokens) - 1),
        rewards={"x": sum(rewards)},
        status=status,  # type: ignore[arg-type]
        turns=turns,
    )


REWARDS = [[1.0, 0.0, 2.0], [0.5, 1.0], [0.25], [3.0, 3.0], [1.0], [0.0, 5.0, 1.0]]
"""Of two groups of three; the last completion doesn't count."""


@pytest.mark.parametrize("kind", ["mean", "leave_one_out", "mean_std"])
def test_a_turn_is_credited_with_what_it_can_change(kind: str) -> None:
    keys: dict[str, Any] = {
        "steps": 1,
        "max_new_tokens": 6,
        "prompts_per_step": 2,
        "samples_per_prompt": 3,
    }
    keys |= {"microbatch_size": 1, "learning_rate": 0.1, "checkpoint_interval": 1}
    tasks = [{"source": "parity", "tools": ["calculator"]}]
    own = {"start_from": "weights", "tasks": tasks, "advantage": kind, "credit": "turn"}
    train = ReinforceConfig.model_validate({**keys, **own})
    counts_N = np.array([True] * 5 + [False])
    found_NT = advantages_of_turns([*map(with_turns, REWARDS)], counts_N, train)
    for row, rewards in enumerate(REWARDS):
        group = [one for one in range(row // 3 * 3, row // 3 * 3 + 3) if counts_N[one]]
        for turn in range(3):
            returns = {one: sum(REWARDS[one][turn:]) for one in group if turn < len(REWARDS[one])}
            wanted = 0.0
            if row in returns and len({*returns.values()}) > 1:
                others = [value for one, value in returns.items() if one != row]
                everyone = [*returns.values()]
                baseline = np.mean(others if kind == "leave_one_out" else everyone)
                scale = np.std(everyone, ddof=1) + 1e-4 if kind == "mean_std" else 1.0
                wanted = float((returns[row] - baseline) / scale)
            assert found_NT[row, turn] == pytest.approx(wanted, abs=1e-12), (rewards, turn)
    assert (found_NT[2, 1:] == 0).all()
    batch = PolicyBatch.of([[3]] * 6, [*map(with_turns, REWARDS)], 6, counts_N)
    a, b, c = found_NT[0].astype(np.float32).tolist()
    assert batch.per_token(found_NT)[0].tolist() == [a, 0, b, 0, c, 0]


def test_a_killed_run_with_turns_ends_as_if_nothing_had_happened(
    start: Path, whole: RunFolder, tmp_path: Path
) -> None:
    run = make_run_with_turns(tmp_path / "run", start)
    with pytest.MonkeyPatch.context() as patch:
        kill_in(patch, PolicyUpdater, "update", 1)
        with pytest.raises(Killed):
            reinforce(run, trust_verifier=True)
    assert reinforce(run, trust_verifier=True) == 0
    assert_same_end(run, whole)


def test_a_stale_run_resumes_and_replays(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps learn from texts of the weights before the last update, but for the first step."""
    keys: dict[str, Any] = {
        "staleness": 1,
        "steps": 4,
        "learning_rate": 0.01,
        "sharding": {"devices": 1},
    }
    whole, run = (make_run_with_turns(tmp_path / name, start, **keys) for name in ("whole", "run"))
    assert reinforce(whole, trust_verifier=True) == 0
    gaps = [step.largest_log_prob_gap for step in steps_of(whole)]
    assert gaps[0] < 1e-5
    assert min(gaps[1:]) > 1e-3
    assert all(step.clipped_ratios is not None for step in steps_of(whole))
    with pytest.MonkeyPatch.context() as patch:
        kill_in(patch, PolicyUpdater, "update", 3)
        with pytest.raises(Killed):
            reinforce(run, trust_verifier=True)
    assert reinforce(run, trust_verifier=True) == 0
    assert_same_end(run, whole)
    config = load_reinforcement_run(run.path)
    for step, first in (("step-000001", "the start: 1 step"), ("step-000003", "000000: 2 steps")):
        assert replay(run, config, step, KIND) == 0
        printed = capsys.readouterr().out
        assert "the same 16 texts" in printed
        assert first in printed, "sampled again, not read"
    path = RolloutFiles(run.rollouts).step(3)
    path.write_text(path.read_text().replace('"tokens":[', '"tokens":[0,'))
    path.write_text(path.read_text().replace('"tokens": [', '"tokens": [0, '))
    assert replay(run, config, "step-000003", KIND) == 1


def refuse(*_: Any) -> None:
    raise AssertionError("asked again")


def test_a_replay_asks_nothing(
    unrepeatable: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Environment, "begin", refuse)
    config = load_reinforcement_run(unrepeatable.path)
    assert replay(unrepeatable, config, "step-000002", KIND) == 0
    assert "the same 16 texts" in capsys.readouterr().out


def test_recorded_steps_are_not_asked_again(
    unrepeatable: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Environment, "begin", refuse)
    before = completions_of(unrepeatable)
    metrics = [step.reproducible for step in steps_of(unrepeatable)]
    assert reinforce(unrepeatable, rewind_to="step-000000", trust_verifier=True) == 0
    assert completions_of(unrepeatable) == before
    assert [step.reproducible for step in steps_of(unrepeatable)] == metrics


def test_other_texts_than_the_recorded_ones_are_asked_anew(
    unrepeatable: RunFolder, tmp_path: Path, start: Path
) -> None:
    """Such as those of a step that another version sampled."""
    run = make_run_with_turns(tmp_path / "run", start, steps=1)
    files = RolloutFiles(run.rollouts)
    recorded = read(RolloutFiles(unrepeatable.rollouts).step(0))
    files.write(files.step(0), [dataclasses.replace(one, tokens=[0]) for one in recorded])
    assert reinforce(run, trust_verifier=True) == 0
    turns = [turn for completion in completions_of(run) for turn in completion.turns]
    assert {turn.reply for turn in turns} <= {"0:", "1:"}


def test_the_check_names_what_differs(whole: RunFolder, unrepeatable: RunFolder) -> None:
    """After the first turn of a recorded completion."""
    text, code = check_environment(whole, load_reinforcement_run(whole.path), KIND)
    assert (code, text.splitlines()[-1]) == (0, "the same both times")
    assert "nothing that was said is rewarded" not in text
    text, code = check_environment(unrepeatable, load_reinforcement_run(unrepeatable.path), KIND)
    assert code == 1
    assert "; ! the second time " in text


@pytest.mark.parametrize(
    ("old", "new", "failed"),
    [
        ('f"{self.bit}:"', "self.unknown", 12),
        ('f"{self.bit}:"', "'no such tokens'", 12),
        ("self.turns == 3", "self.turns == 3 and bool(1 / said['correct'])", 4),
        ("self.turns += 1", "assert self.parity in text; self.turns += 1", 8),
    ],
)
def test_the_check_names_what_fails_also_after_wrong_answers(
    start: Path, tmp_path: Path, old: str, new: str, failed: int
) -> None:
    run = make_run_with_turns(tmp_path / "run", start, ENVIRONMENT.replace(old, new))
    text, exit_code = check_environment(run, load_reinforcement_run(run.path), KIND)
    assert (exit_code, text.splitlines()[-1]) == (1, f"! failed on {failed} of 12 texts")


def test_the_check_says_if_nothing_is_rewarded(start: Path, tmp_path: Path) -> None:
    code = ENVIRONMENT.replace("said, self.turns", "-1.0, self.turns")
    run = make_run_with_turns(tmp_path / "run", start, code)
    text, exit_code = check_environment(run, load_reinforcement_run(run.path), KIND)
    assert (exit_code, text.splitlines()[-1]) == (0, "the same both times")
    assert "nothing that was said is rewarded" in text


def test_records_from_before_there_were_turns_are_read(whole: RunFolder, tmp_path: Path) -> None:
    line = json.loads(RolloutFiles(whole.rollouts).step(0).read_text().splitlines()[0])
    del line["turns"]
    (tmp_path / "old.jsonl").write_text(json.dumps(line))
    [old] = read(tmp_path / "old.jsonl")
    [turn] = old.answered_turns
    assert (turn.wrote, turn.verdict, turn.over) == (old.text, old.verdict, True)
    assert old.written_tokens == len(old.tokens)
