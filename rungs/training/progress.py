"""The progress of a run: a bar on a terminal; elsewhere, and in `train.log`, lines at regular
intervals. The bar's remaining time is tqdm's, that of lines `_seconds_left`."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, Self

from tqdm import tqdm

from rungs.common import run_log
from rungs.common.run_log import log
from rungs.common.shown_text import format_duration
from rungs.parallel.processes import is_first_process
from rungs.run.metrics import R, StepRecord
from rungs.training.run_length import RunLength


class Progress(Generic[R]):
    """Shows the steps of a start out of the run's length. `headline` returns the main values of one
    or more steps, by name; `peak_tokens_per_second` is for the devices' peak FLOP/s, if known;
    `clock` returns seconds."""

    def __init__(
        self,
        first_step: int,
        length: RunLength,
        headline: Callable[[Sequence[R]], dict[str, str]],
        peak_tokens_per_second: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._first_shown = clock, 0.0
        self._first_step, self._length = first_step, length
        self._headline, self._peak = headline, peak_tokens_per_second
        self._unshown: list[R] = []
        self._has_bar = run_log.TERMINAL.shows_bars
        self._bar = tqdm(
            file=run_log.TERMINAL,
            total=length.total_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            smoothing=0,  # a mean over all steps, so that a validation causes no jump
            disable=not (is_first_process() and self._has_bar),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, metrics: R) -> None:
        """Show the next step."""
        self._bar.total = self._length.total_steps
        self._bar.set_postfix(self._postfix(metrics), refresh=False)
        self._bar.update()
        self._unshown.append(metrics)
        is_first = metrics.global_step == self._first_step
        if is_first:
            self._first_shown = self._clock()
        if is_first or _seconds(self._unshown) >= run_log.SECONDS_BETWEEN_LINES:
            line = self._line(has_speed=not is_first)  # the first step includes compilation
            if self._has_bar:
                run_log.log_to_file_only(logging.INFO, line)
            else:
                log.info("%s", line)
            self._unshown.clear()

    def _postfix(self, metrics: R) -> dict[str, str]:
        postfix = {**self._headline([metrics]), "lr": f"{metrics.learning_rate:.2e}"}
        postfix["tok/s"] = f"{metrics.tokens_per_second:,.0f}"
        if self._peak is not None:
            postfix["MFU"] = f"{metrics.tokens_per_second / self._peak:.0%}"
        return postfix

    def _line(self, has_speed: bool) -> str:
        """Return one line on the steps since the previous line: main values, the last one's number,
        learning rate and gradient norm, and the mean speed."""
        last = self._unshown[-1]
        return f"step {last.global_step:,} of {self._length.total_steps:,}: " + ", ".join(
            [
                *(f"{name} {text}" for name, text in self._headline(self._unshown).items()),
                f"learning rate {last.learning_rate:.2e}",
                f"gradient norm {last.gradient_norm:.3g}",
                *(self._speed() if has_speed else ()),
            ]
        )

    def _speed(self) -> list[str]:
        steps, seconds = self._unshown, _seconds(self._unshown)
        rate = sum(step.tokens_per_second * step.step_seconds for step in steps) / seconds
        mfu = [f"MFU {rate / self._peak:.0%}"] if self._peak is not None else []
        return [f"{rate:,.0f} tokens/s", *mfu, f"{format_duration(self._seconds_left())} left"]

    def _seconds_left(self) -> float:
        """Return the time left at the pace since the first step, validations and saves included."""
        next_step, work = self._unshown[-1].global_step + 1, self._length.work
        pace = (self._clock() - self._first_shown) / work(self._first_step + 1, next_step)
        return work(next_step, self._length.total_steps) * pace


def _seconds(steps: Sequence[StepRecord]) -> float:
    return sum(step.step_seconds for step in steps)
