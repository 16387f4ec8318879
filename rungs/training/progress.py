"""How far a run is: a progress bar on a terminal; elsewhere, and in `train.log`, plain lines at a
steady interval."""

import logging
from collections.abc import Sequence
from typing import Self

from tqdm import tqdm

from rungs.common import run_log
from rungs.common.run_log import SECONDS_BETWEEN_LINES, TERMINAL
from rungs.common.text_table import format_duration
from rungs.parallel.processes import is_first_process
from rungs.run.metrics import StepMetrics

log = logging.getLogger("rungs")


class Progress:
    """Shows the steps of a start.

    Args:
        steps: from the first to the last one.
        peak_tokens_per_second: what the devices could do at their peak FLOPS, if that is known.
    """

    def __init__(self, steps: range, peak_tokens_per_second: float | None) -> None:
        self._steps, self._peak = steps, peak_tokens_per_second
        self._unshown: list[StepMetrics] = []
        self._has_bar = TERMINAL.shows_bars
        self._bar = tqdm(
            file=TERMINAL,
            total=steps.stop,
            initial=steps.start,
            unit="step",
            dynamic_ncols=True,
            disable=not (is_first_process() and self._has_bar),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, metrics: StepMetrics) -> None:
        """Show the next step."""
        self._bar.set_postfix(self._postfix(metrics), refresh=False)
        self._bar.update()
        self._unshown.append(metrics)
        is_first = metrics.global_step == self._steps.start
        if is_first or _seconds(self._unshown) >= SECONDS_BETWEEN_LINES:
            self._log(self._line(has_speed=not is_first))  # the first step was compiled
            self._unshown.clear()

    def _log(self, line: str) -> None:
        if self._has_bar:
            run_log.log_to_file_only(logging.INFO, line)
        else:
            log.info("%s", line)

    def _postfix(self, metrics: StepMetrics) -> dict[str, str]:
        postfix = {"loss": _format_loss([metrics]), "lr": f"{metrics.learning_rate:.2e}"}
        if metrics.validation_loss is not None:
            postfix["validation"] = f"{metrics.validation_loss:.4f}"
        postfix["tok/s"] = f"{metrics.tokens_per_second:,.0f}"
        if self._peak is not None:
            postfix["MFU"] = f"{metrics.tokens_per_second / self._peak:.0%}"
        return postfix

    def _line(self, has_speed: bool) -> str:
        """Return the steps since the previous line as one: the last one's number, learning rate and
        gradient norm, and the means of the rest."""
        last = self._unshown[-1]
        return f"step {last.global_step:,} of {self._steps.stop:,}: " + ", ".join(
            [
                f"loss {_format_loss(self._unshown)}",
                f"learning rate {last.learning_rate:.2e}",
                f"gradient norm {last.gradient_norm:.3g}",
                *(self._speed() if has_speed else ()),
                *(
                    f"validation loss {step.validation_loss:.4f}"
                    for step in self._unshown
                    if step.validation_loss is not None
                ),
            ]
        )

    def _speed(self) -> list[str]:
        steps, seconds = self._unshown, _seconds(self._unshown)
        rate = sum(step.tokens_per_second * step.step_seconds for step in steps) / seconds
        remaining = self._steps.stop - 1 - steps[-1].global_step
        mfu = [f"MFU {rate / self._peak:.0%}"] if self._peak is not None else []
        left = format_duration(remaining * seconds / len(steps))
        return [f"{rate:,.0f} tokens/s", *mfu, f"{left} left"]


def _seconds(steps: Sequence[StepMetrics]) -> float:
    return sum(step.step_seconds for step in steps)


def _format_loss(steps: Sequence[StepMetrics]) -> str:
    """Return the mean loss of the steps that have one."""
    losses = [step.train_loss for step in steps if step.train_loss is not None]
    return f"{sum(losses) / len(losses):.4f}" if losses else "none"
