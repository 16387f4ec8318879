"""The number of steps of a run: those of its data or, with `max_minutes`, as many as fit.

The speed of the first steps tells how many fit; the number is corrected at most once after each of
`_DECIDED_AT`. `length.jsonl` records each number, with the first step whose learning rate follows
it; a resumed run takes these and corrects nothing."""

import time
from collections.abc import Callable

import jax
import numpy as np

from rungs.checkpointing.load import Start
from rungs.common.run_log import log
from rungs.common.shown_text import counted
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.train_config import TrainConfig
from rungs.optim.schedule import learning_rate_schedule
from rungs.parallel.devices import host_device
from rungs.parallel.processes import broadcast_from_first, is_first_process
from rungs.run import records

_DECIDED_AT = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.96)
"""Shares of the time after which the number of steps is decided or corrected."""
_WARM_UP_STEPS, _LEAST_STEPS = 2, 2
"""Steps before the clock is read, as the first is compiled; least steps to measure a speed."""
_RATES = 1024
"""Steps whose learning rates are computed together."""
_CORRECTED = 0.005
"""Smallest correction, as a share of the time."""


class RunLength:
    """A number of steps known at the start. `train` tells whether steps grow."""

    def __init__(self, total_steps: int, train: OptimizationConfig | None = None) -> None:
        self.total_steps = total_steps
        self._batches = train if isinstance(train, TrainConfig) and train.batch_growth else None

    def work(self, first: int, end: int) -> int:
        """Return the work from step `first` to before `end`: steps or, if these grow, sequences."""
        if self._batches is None:
            return end - first
        return self._batches.sequences_before(end) - self._batches.sequences_before(first)

    def end(self, first: int, work: float) -> int:
        """Return the step before which this much work, counted from `first` on, is done."""
        if self._batches is None:
            return first + int(work)
        return self._batches.steps_of(self._batches.sequences_before(first) + int(work))

    def decide(
        self, step: int, closing_seconds: float, any_process: Callable[[bool], bool]
    ) -> None:
        """Decide, before a step is taken, the number of steps. `closing_seconds` is the time of the
        run's end after its last step; `any_process` tells if a condition holds in any process."""

    def left(self, step: int, pace: float) -> int:  # noqa: ARG002
        """Return the number of steps left, of which the next takes `pace` seconds."""
        return self.total_steps - step

    def learning_rate(self, step: int) -> np.float32 | None:  # noqa: ARG002
        """Return the learning rate of a step; None if the compiled step knows it, as it does unless
        the number of steps is decided later."""
        return None


class TimedLength(RunLength):
    """As many steps as fit into `max_minutes`, at most the data's `most_steps`. `began` is the
    start of that time in `time.monotonic()`; None to decide nothing."""

    def __init__(self, start: Start, most_steps: int, began: float | None) -> None:
        self._run, self._train, self._most = start.run, start.config.train, most_steps
        is_new = start.saved is None and began is not None
        minutes = self._train.max_minutes
        recorded = [] if is_new else records.read_lengths(start.run, minutes)
        self._lengths = [one for one in recorded if one.total_steps <= most_steps]
        if start.saved and self._lengths:  # decided, unless --extend adds time
            minutes -= self._lengths[-1].max_minutes or start.saved.meta.train["max_minutes"]
        self._seconds, self._began = 60 * minutes, began or 0.0
        is_open = began is not None and minutes > 0
        self._decisions = [part * self._seconds for part in _DECIDED_AT if is_open]
        self._first_mark = start.first_step + _WARM_UP_STEPS
        self._mark = 0, 0.0
        self._rates: dict[tuple[int, int], np.ndarray] = {}
        is_decided = self._lengths and not is_open
        super().__init__(self._lengths[-1].total_steps if is_decided else most_steps, self._train)

    def decide(
        self, step: int, closing_seconds: float, any_process: Callable[[bool], bool]
    ) -> None:
        if not self._decisions or step < self._first_mark:
            return
        now = time.monotonic()
        if step == self._first_mark:
            self._mark = step, now
        steps, elapsed = step - self._mark[0], now - self._began
        if not any_process(steps >= _LEAST_STEPS and elapsed >= self._decisions[0]):
            return
        pace = (now - self._mark[1]) / self.work(self._mark[0], step)
        left = self._seconds - elapsed - closing_seconds
        fitting = self.end(step - 1, left / pace)  # the previous step has only begun
        total = min(max(fitting, step + 1), self._most)
        change = abs(self.work(self.total_steps, total)) * pace
        if self._lengths and change < _CORRECTED * self._seconds:
            total = self.total_steps
        later = [due for due in self._decisions[1:] if due > elapsed]
        answer = broadcast_from_first(lambda: f"{total} {len(later)}")
        total, number = map(int, answer.split())
        self._decisions = self._decisions[len(self._decisions) - number :]
        self._mark = step, now
        if total != self.total_steps or not self._lengths:
            self._set(step, total, pace * self.work(step - 1, step))

    def _set(self, step: int, total: int, pace: float) -> None:
        self.total_steps = total
        decided = records.Length(
            time=records.now(),
            step=step,
            total_steps=total,
            max_minutes=self._train.max_minutes,
        )
        self._lengths.append(decided)
        if is_first_process():
            records.append(self._run, [decided])
        reason = "of the data" if total == self._most else "in max_minutes"
        log.info("step %s: %.3g s a step, %s %s", f"{step:,}", pace, counted(total, "step"), reason)

    def left(self, step: int, pace: float) -> int:
        work = self._seconds / pace * self.work(step, step + 1)
        return min(super().left(step, pace), self.end(step, work) - step)

    def learning_rate(self, step: int) -> np.float32:
        total = next((one.total_steps for one in self._lengths[::-1] if one.step <= step), None)
        total = total or self._most
        step = min(step, total - 1)
        key = total, step // _RATES
        if key not in self._rates:
            self._rates = {key: _learning_rates(self._train, *key)}
        return np.float32(self._rates[key][step % _RATES])


def _learning_rates(train: TrainConfig, total_steps: int, block: int) -> np.ndarray:
    """Return the learning rates of a block of steps, computed on the host."""
    schedule = learning_rate_schedule(train, total_steps)
    with jax.default_device(host_device()):
        steps = block * _RATES + np.arange(_RATES, dtype=np.uint32)
        return np.asarray(jax.vmap(schedule)(steps))


def run_length(start: Start, most_steps: int, began: float | None = None) -> RunLength:
    """Return the length of a run, at most `most_steps`, those of the data or the config. `began` is
    the start of `max_minutes` in `time.monotonic()`; None for repeating steps."""
    train = start.config.train
    if isinstance(train, TrainConfig) and train.max_minutes is not None:
        return TimedLength(start, most_steps, began)
    return RunLength(most_steps, train)
