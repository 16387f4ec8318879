"""What a run tells: log messages as it starts and ends, and its progress, which is a bar on a
terminal; elsewhere, and in `train.log`, lines at regular intervals."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Self

import jax
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from rungs.checkpointing.load import Start
from rungs.checkpointing.manifest import CheckpointMeta
from rungs.common import run_log, shown_text
from rungs.common.run_log import log
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.run_config import AnyRunConfig, RunConfig, unused_keys
from rungs.config.train_config import TrainConfig
from rungs.data.provenance import notes_on_beginnings
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.tokens.loader import TrainingData
from rungs.model.gpt import GPT
from rungs.optim.precision import dtype_of
from rungs.optim.schedule import learning_rate_schedule
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.devices import idle_devices, recorded_sharding
from rungs.parallel.processes import is_first_process
from rungs.planning import advice, hardware, memory
from rungs.planning.flops import count_active_parameters, count_parameters, training_flops_per_token
from rungs.run.folder import RunFolder
from rungs.run.metrics import R, StepRecord
from rungs.step.state import shapes_of
from rungs.training.learner import Learner
from rungs.training.run_length import RunLength

_SAME_RATE = 1e-3
"""Relative difference of learning rates that isn't mentioned."""
_MUCH_PADDING = 0.5
"""Share of padding above which packing is suggested."""


def log_start(start: Start, mesh: Mesh, steps: int, step_size: str, notes: str) -> None:
    """Log where a run begins, its maximum length and its devices. `step_size` describes a step;
    `notes` follow the dtype."""
    if start.saved is not None:
        begins = "branches from" if start.is_branching else "resumes after"
        begins += f" step {start.saved.step:,}, {start.saved.folder.name}"
    else:
        begins = f"starts from {_with_step(start.weights.path)}" if start.weights else "starts"
    train = start.config.train
    sharding, processes = recorded_sharding(train, mesh), jax.process_count()
    devices = shown_text.counted(mesh.size, f"{jax.devices()[0].device_kind} device")
    if mesh.size > 1:
        devices += f", {sharding.mode}" + f": {sharding.text}" * (sharding.sizes[1] > 1)
    devices += f", {processes} processes" * (processes > 1)
    log.info(
        "%s %s: %s%s of %s on %s, in %s%s",
        *(start.run.path, begins, _most(train), shown_text.counted(steps, "step"), step_size),
        *(devices, train.compute_dtype, notes),
    )
    if start.saved and (start.is_branching or start.options.extend):
        log_other_length(start.saved.meta, train, steps, start.run.length.exists())
    if train.sharding and train.sharding.devices and mesh.size < jax.device_count():
        log.info(
            "uses %d of %d devices, as sharding.devices in the config says: %s",
            *(mesh.size, jax.device_count(), ", ".join(map(str, mesh.devices.flat))),
        )


def log_other_length(
    saved: CheckpointMeta, train: OptimizationConfig, total_steps: int, is_timed: bool
) -> None:
    """Log what changes at the step of a checkpoint because a branch or an extended run has another
    schedule or length: the learning rate, and where phases end."""
    before, step = saved.learning_rate, saved.global_step
    now = float(learning_rate_schedule(train, total_steps)(step))
    if before is not None and not is_timed and not math.isclose(before, now, rel_tol=_SAME_RATE):
        log.info(
            "learning rate of step %s: %.3g, but %.3g with the schedule, rate and length before",
            *(f"{step:,}", now, before),
        )
    phases = getattr(train, "phases", ())
    if phases and saved.total_steps != total_steps and not saved.stopped_after:
        log.info(
            "phases are shares of %s, and were of %s before: step %s may be in another",
            *(shown_text.counted(total_steps, "step"), f"{saved.total_steps:,}", f"{step + 1:,}"),
        )


def _most(train: OptimizationConfig) -> str:
    """Return the prefix of a number of steps or tokens if the run's time may allow fewer."""
    is_timed = isinstance(train, TrainConfig) and train.max_minutes is not None
    return "at most " if is_timed else ""


def log_validation_change(before: str | None, now: str | None) -> None:
    """Log if validation losses are not comparable with those before this start."""
    if now != before:
        log.info(
            "validation data: was %s, is now %s; best compares only losses on the same data, so it"
            " starts over with the next checkpoint; the best one so far is kept",
            *(data or "none (the training loss decides)" for data in (before, now)),
        )


def log_data(config: RunConfig, data: TrainingData, tokenizer: Tokenizer | None) -> None:
    """Log the share of padding in packed sequences, which datasets of pairs or chats are mostly
    padding, and the special tokens that the sequences begin with or lack."""
    for name, share in data.padding.items():
        if config.train.packing == "best_fit":
            log.info("dataset %s: %.2f%% of its packed sequences is padding", name, 100 * share)
        elif share > _MUCH_PADDING and not config.train.learns_preferences:  # which can't be packed
            log.info(
                'dataset %s: %.0f%% of its sequences is padding; with "documents": "separate" in'
                " train.json, a sequence holds several pairs or chats",
                name,
                100 * share,
            )
    for note in notes_on_beginnings(data.datasets, tokenizer) if tokenizer else []:
        log.info("dataset %s", note)


def warn_of_unused_keys(run: RunFolder, config: AnyRunConfig, has_validation: bool = True) -> None:
    """Log a warning for each key that is set but has no effect."""
    for line in unused_keys(config, has_validation):
        log.warning("%s/%s", run.path, line)


def log_size(
    run: RunFolder,
    config: RunConfig,
    data: TrainingData,
    model: GPT,
    optimizer: SkippingOptimizer,
    mesh: Mesh,
) -> None:
    """Log the part of the plan that needs no tracing: parameters, FLOPs, tokens, memory; how many
    parameters are trainable, unless all are."""
    shapes = shapes_of(config.model, config.train.lora)
    total = count_parameters(shapes).total
    active = count_active_parameters(shapes, config.model).total
    flops = training_flops_per_token(config)
    log.info(
        "%s parameters%s, %s MFLOPs per token; %s%s tokens, %.3g per parameter; weights, moments"
        " and gradients take %s of %s on each device; for more: %s %s",
        f"{total:,}",
        f", {active:,} active per token" if active < total else "",
        f"{flops / 1e6:,.1f}",
        *(_most(config.train), f"{data.total_tokens:,}", data.total_tokens / active),
        shown_text.format_bytes(memory.state_bytes(model, optimizer)),
        shown_text.format_bytes(advice.device_bytes(mesh)),
        *(shown_text.command_line("plan"), shown_text.quoted(run.path)),
    )
    trainable, held = (
        sum(array.size for array in jax.tree.leaves(nnx.state(model, kind)))
        for kind in (optimizer.wrt, nnx.Param)
    )
    if trainable < held:
        log.info("trains %s of %s parameters", f"{trainable:,}", f"{held:,}")


def _with_step(path: Path) -> str:
    """Return the path of weights, and the checkpoint that its folder links to, such as `best`."""
    real = path.resolve().parent.name
    return f"{path} ({real})" if path.parent.is_symlink() else f"{path}"


def log_end(start: Start, total_steps: int, learner: Learner[R], last: R | None) -> None:
    """Log the results of a run as this start ends; `last` is its last step, or None."""
    step = last.global_step if last else start.first_step - 1
    is_stopped = step + 1 < total_steps
    log.info(
        "%s after step %s: %s",
        "stopped" if is_stopped else "finished",
        f"{step:,}" if step >= 0 else "none",
        learner.summary(start.run, last),
    )
    if is_stopped:
        log.info("to resume: %s %s", start.config.command_again, shown_text.quoted(start.run.path))


def log_finished(start: Start, edit: str) -> None:
    """Log that nothing is left to train, and the edit that makes the run longer."""
    if start.stopped_after:
        log.info(
            "%s is finished: stop_after ended it after %s steps, as the last %s had no lower"
            " validation loss; to train longer, set more stop_after in train.json, or null",
            *(start.run.path, f"{start.first_step:,}"),
            shown_text.counted(start.stopped_after, "validation"),
        )
        return
    if getattr(start.config.train, "phases", ()):
        edit = "branch it with --like and --from-step, as its phases follow from its length"
    else:
        edit += " and add --extend"
    log.info(
        "%s is finished: %s steps; to train longer, %s",
        *(start.run.path, f"{start.first_step:,}", edit),
    )


def peak_tokens_per_second(config: RunConfig, mesh: Mesh) -> float | None:
    """Return the tokens per second at the devices' peak FLOP/s, or None."""
    kind = hardware.device_of_kind(mesh.devices.flat[0].device_kind)
    peak = kind and kind.peak(dtype_of(config.train))
    return mesh.size * peak / training_flops_per_token(config) if peak else None


def warn_of_devices(train: TrainConfig, mesh: Mesh) -> None:
    """Warn of idle accelerators, or if a CPU would emulate FP8. Virtual CPU devices, which share
    all cores, are never idle."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    if is_cpu and train.uses_float8:
        log.warning(
            "matmul_dtype: a CPU emulates FP8: numbers are rounded to 8 bits and multiplied in %s,"
            " which is slower than without",
            train.compute_dtype,
        )
    if not is_cpu and (line := idle_devices(train, mesh.size, jax.device_count())):
        log.warning("%s", line)


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
        postfix = {**self._headline([metrics]), "lr": f"{metrics.learning_rate:.2e}"}
        postfix["tok/s"] = f"{metrics.tokens_per_second:,.0f}"
        if self._peak is not None:
            postfix["MFU"] = f"{metrics.tokens_per_second / self._peak:.0%}"
        self._bar.set_postfix(postfix, refresh=False)
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
        """Return the mean speed, and the time left at the pace since the first step, validations
        and saves included."""
        steps, seconds = self._unshown, _seconds(self._unshown)
        rate = sum(step.tokens_per_second * step.step_seconds for step in steps) / seconds
        mfu = [f"MFU {rate / self._peak:.0%}"] if self._peak is not None else []
        next_step, work = steps[-1].global_step + 1, self._length.work
        pace = (self._clock() - self._first_shown) / work(self._first_step + 1, next_step)
        left = shown_text.format_duration(work(next_step, self._length.total_steps) * pace)
        return [f"{rate:,.0f} tokens/s", *mfu, f"{left} left"]


def when_measured(step: StepRecord, last: StepRecord) -> str:
    """Return after which step a value was measured, if that is not the last one."""
    return "" if step is last else f" (step {step.global_step:,})"


def _seconds(steps: Sequence[StepRecord]) -> float:
    return sum(step.step_seconds for step in steps)
