"""`max_minutes`: a run takes as many steps as fit, and the same ones when it is resumed."""

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rungs.checkpointing.load import Start
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig, load_run
from rungs.optim.schedule import learning_rate_schedule
from rungs.run import metrics, records
from rungs.run.derive import BranchPoint, NewRun
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.records import Length
from rungs.training import run_length
from rungs.training.dataset_learner import on_datasets
from rungs.training.resume import find_branch_point
from rungs.training.run_length import RunLength, TimedLength
from rungs.training.start import launch
from tests.support.configs import model_config, train_config
from tests.support.tiny_run import assert_same_outcome, change, make_run

MINUTES, CLOSING = 5, 4.0
SECONDS = 60 * MINUTES


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds."""
    time = [1000.0]
    monkeypatch.setattr(run_length, "time", SimpleNamespace(monotonic=lambda: time[0]))
    return time


def timed(
    folder: Path, now: list[float], most_steps: int = 100_000, **train: object
) -> TimedLength:
    config = RunConfig(model_config(), train_config(max_minutes=MINUTES, **train))
    start = Start(RunFolder(folder), config, StartOptions(), None, None)
    return TimedLength(start, most_steps, now[0])


def simulate(
    length: TimedLength, now: list[float], seconds: Callable[[int, float], float]
) -> tuple[list[float], float]:
    """Take the steps; return their learning rates, and how long the run took."""
    begin, rates = now[0], []
    for step in range(1_000_000):
        length.decide(step, CLOSING, lambda here: here)
        if step == length.total_steps:
            break
        rates.append(float(length.learning_rate(step)))
        now[0] += seconds(step, now[0] - begin)
    return rates, now[0] - begin + CLOSING


PACES: dict[str, Callable[[int, float], float]] = {
    "steady": lambda step, _: 20 if step == 0 else 0.25,
    "slow steps": lambda step, _: 20 if step == 0 else 4.0,
    "twice as slow after a minute": lambda step, at: 20 if step == 0 else 0.2 + 0.2 * (at > 60),
    "faster in the end": lambda step, at: 20 if step == 0 else 0.3 - 0.1 * (at > 200),
    "with a validation every 50 steps": lambda step, _: 5 if step % 50 == 0 else 0.2,
    "noisy": lambda step, _: 20 if step == 0 else 0.2 * (1 + 0.5 * np.sin(step * 12.9898)),
}


@pytest.mark.parametrize("pace", PACES)
def test_a_run_takes_its_time_within_two_percent(
    pace: str, tmp_path: Path, now: list[float]
) -> None:
    length = timed(tmp_path, now)
    rates, took = simulate(length, now, PACES[pace])
    assert took == pytest.approx(SECONDS, rel=0.02)
    assert rates[-1] == pytest.approx(0.1 * max(rates), rel=0.02)  # min_learning_rate_percent
    lengths = records.read(RunFolder(tmp_path), Length)
    assert lengths[-1].total_steps == length.total_steps == len(rates)
    if pace == "steady":
        assert len(lengths) == 1


@pytest.mark.parametrize("first", [150, 500])
def test_steps_that_grow_are_counted_in(first: int, tmp_path: Path, now: list[float]) -> None:
    """They are so before the batch grows, and compiling the larger step is corrected for."""
    length = timed(tmp_path, now, batch_growth={f"{first}": 3})
    compiled = {0: 20.0, first: 10.0}
    rates, took = simulate(
        length, now, lambda step, _: compiled.get(step, 0.2 * (3 if step > first else 1))
    )
    assert took == pytest.approx(SECONDS, rel=0.02)
    assert rates[-1] == pytest.approx(0.1 * max(rates), rel=0.02)
    before_growth = records.read(RunFolder(tmp_path), Length)[0]
    assert before_growth.step < first
    assert before_growth.total_steps == pytest.approx(len(rates), rel=0.06)


def test_a_run_is_no_longer_than_its_data(tmp_path: Path, now: list[float]) -> None:
    length = timed(tmp_path, now, most_steps=40)
    rates, took = simulate(length, now, PACES["steady"])
    assert len(rates) == length.total_steps == 40
    assert took < SECONDS / 2


def test_the_steps_left_are_those_that_fit(tmp_path: Path, now: list[float]) -> None:
    length = timed(tmp_path, now)
    assert (length.left(0, pace=0.5), length.left(99_900, pace=0.5)) == (SECONDS * 2, 100)
    assert RunLength(50).left(20, pace=0.5) == 30


def test_learning_rates_are_those_of_the_schedule(tmp_path: Path, now: list[float]) -> None:
    length = timed(tmp_path, now, most_steps=3000)
    schedule = learning_rate_schedule(train_config(), 3000)
    for step in (0, 1, 1023, 1024, 2999, 1500):
        assert length.learning_rate(step) == pytest.approx(float(schedule(step)), rel=1e-6)


def test_a_step_that_takes_longer_than_all_minutes_is_followed_by_few(
    tmp_path: Path, now: list[float]
) -> None:
    rates, _ = simulate(timed(tmp_path, now), now, lambda *_: 2 * SECONDS)
    assert len(rates) == 5


@pytest.fixture(scope="module")
def clock() -> Iterator[None]:
    """Each look at the clock is a second later."""
    time = iter(range(1_000_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_length, "time", SimpleNamespace(monotonic=lambda: float(next(time))))
        yield


@pytest.fixture(scope="module")
def whole(
    clock: None,  # noqa: ARG001
    datasets_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> RunFolder:
    """A run that took its time."""
    keys = {"max_minutes": 0.2, "epochs": 100, "keep_checkpoints": -1}
    run = make_run(tmp_path_factory.mktemp("whole") / "run", **keys)
    assert train(run, datasets_dir) == 0
    return run


def train(run: RunFolder, datasets: Path, **options: object) -> int:
    start = StartOptions(**options)  # type: ignore[arg-type]
    return launch(run, load_run(run.path), start, on_datasets(datasets), 0.0)


@pytest.mark.long
@pytest.mark.usefixtures("clock")
def test_it_resumes_bit_for_bit_and_can_be_extended(
    whole: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    """As the number of steps is an argument, no bits depend on when it was decided."""
    steps = metrics.read(whole.metrics)
    (length, *_) = records.read(whole, Length)[::-1]
    assert 8 < length.total_steps == len(steps) < 20
    rates = [step.learning_rate or 0 for step in steps]
    assert rates[-1] < 0.2 * max(rates)

    resumed = RunFolder(tmp_path / "resumed")
    shutil.copytree(whole.path, resumed.path, symlinks=True)
    assert train(resumed, datasets_dir, rewind_to="5") == 0
    assert_same_outcome(resumed, whole)

    change(resumed, max_minutes=0.1)
    with pytest.raises(UserError, match=r"max_minutes: was 0.2 .*; change it back"):
        train(resumed, datasets_dir)
    change(resumed, max_minutes=0.5)
    assert train(resumed, datasets_dir, extend=True) == 0
    assert len(metrics.read(resumed.metrics)) > len(steps) + 5


@pytest.mark.long
@pytest.mark.usefixtures("clock")
def test_a_branch_has_the_length_of_its_parent_or_minutes_of_its_own(
    whole: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    point = BranchPoint(5, functools.partial(find_branch_point, whole, 5))
    same = NewRun.of(tmp_path / "same", whole.path, {}, point).make()
    assert train(RunFolder(same), datasets_dir) == 0
    assert_same_outcome(RunFolder(same), whole)
    longer = NewRun.of(tmp_path / "longer", whole.path, {"max_minutes": 0.5}, point).make()
    assert not RunFolder(longer).length.exists()
