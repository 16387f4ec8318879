"""The run's own step on its devices, with random token ids: time, memory, determinism, and the time
of a checkpoint. Axes as in `rungs/step/train_step.py`."""

import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.saver import Saver, describe_checkpoint
from rungs.checks.check import Check
from rungs.common.disk import folder_bytes
from rungs.common.shown_text import format_bytes
from rungs.config.run_config import RunConfig
from rungs.model.gpt import GPT
from rungs.objectives.table import make_train_step
from rungs.optim.precision import dtype_of
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel import sharding, target_device
from rungs.planning.compiled_step import needed_bytes
from rungs.planning.flops import model_flops_per_token
from rungs.planning.memory import memory_of
from rungs.step.state import create_model_and_optimizer, named_arrays, shapes_of

MEMORY_TOLERANCE, MEMORY_SLACK = 1.25, 256e6
"""A step that exceeds the plan by both this factor and this many bytes is a problem; small runs
also need programs and buffers of constant size."""
_SECONDS, _MOST_STEPS = 3.0, 50
"""Limits on the timing of steps, in seconds and steps."""
_TOTAL_STEPS = 100
"""Length of the learning-rate schedule."""
_DETERMINISTIC_STEPS = 2
"""Two, as the first one may have a learning rate of 0."""
_SAVES = 2
"""Two, as the first one also compiles and imports."""


@dataclasses.dataclass
class RunningStep:
    """A compiled step and its state."""

    config: RunConfig
    """With resolved compute dtype and sharding sizes."""
    mesh: Mesh
    model: GPT
    optimizer: SkippingOptimizer
    batch: tuple[Array, ...]
    compiled: Any
    compile_seconds: float

    @classmethod
    def create(cls, config: RunConfig, mesh: Mesh, **options: object) -> Self:
        """Compile the step for a run's new model. `options` are the compiler's."""
        model, optimizer = create_model_and_optimizer(config, _TOTAL_STEPS, mesh)
        batch = sharding.place_batch(mesh, *_random_batch(config))
        lowered = make_train_step(config.train, mesh).lower(model, optimizer, *batch)  # type: ignore[attr-defined]
        begin = time.perf_counter()
        compiled = lowered.compile(options)
        return cls(config, mesh, model, optimizer, batch, compiled, time.perf_counter() - begin)

    def run(self, steps: int) -> list[float]:
        """Take steps; return the mean loss of each."""
        results = [self.compiled(self.model, self.optimizer, *self.batch) for _ in range(steps)]
        return [float(np.mean(np.asarray(result.losses_A))) for result in results]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return weights and optimizer state."""
        arrays = named_arrays(self.model) | named_arrays(self.optimizer)
        return {name: np.asarray(array) for name, array in arrays.items()}

    def device_bytes(self) -> int | None:
        """Return a device's peak memory so far; None if JAX doesn't report it (CPU)."""
        stats = [device.memory_stats() or {} for device in self.mesh.local_devices]
        return max((each.get("peak_bytes_in_use") or 0 for each in stats), default=0) or None

    def compiled_bytes(self) -> int:
        """Return the bytes per device by the compiler's analysis."""
        return needed_bytes(self.compiled.compiled, target_device.platform())


class StepTime:
    """Duration of a run's steps: mean seconds of several in a row, and FLOP/s of each device by
    `flops.model_flops_per_token`."""

    def __init__(self, step: RunningStep) -> None:
        self.losses = step.run(1)
        once = self._timed(step, 1)
        count = min(max(math.ceil(_SECONDS / once), 2), _MOST_STEPS)
        self.seconds = self._timed(step, count)
        config = step.config
        shapes = shapes_of(config.model, config.train.lora)
        per_token = model_flops_per_token(shapes, config.model, config.sequence_length)
        self.tokens_per_second = config.tokens_per_step / self.seconds
        self.model_flops = per_token * self.tokens_per_second / step.mesh.size

    def _timed(self, step: RunningStep, count: int) -> float:
        begin = time.perf_counter()
        self.losses += step.run(count)
        return (time.perf_counter() - begin) / count

    def checks(self, step: RunningStep) -> Iterator[Check]:
        """Yield times, and whether losses are finite and fall, as all steps have the same batch."""
        yield Check("compilation of the step", step.compile_seconds, unit="s")
        per_second = f"{self.tokens_per_second:,.0f} tokens per second"
        yield Check("one step", self.seconds, notes=(per_second,), unit="s")
        first, last = self.losses[0], self.losses[-1]
        is_sound = bool(np.isfinite(self.losses).all()) and last < first
        note = f"after {len(self.losses)} steps on one batch"
        yield Check("loss", last, f"less than {first:.4f}", is_sound, (note,))


def memory(step: RunningStep) -> Iterator[Check]:
    """Yield each device's memory next to the plan. Run it first, as earlier programs count."""
    planned, used = memory_of(step.config, step.mesh).total, step.device_bytes()
    yield Check("memory, plan", planned, notes=("of each device",), unit="B")
    yield _compared("memory, compiler", step.compiled_bytes(), planned)
    if used is not None:
        yield _compared("memory, used", used, planned)


def _compared(name: str, size: int, planned: int) -> Check:
    most = max(planned * MEMORY_TOLERANCE, planned + MEMORY_SLACK)
    note = f"the plan is {planned / size:.0%} of it"
    return Check(name, size, f"at most {format_bytes(most)}", size <= most, (note,), "B")


def checkpoint(step: RunningStep, folder: Path) -> Iterator[Check]:
    """Yield, for the last of several checkpoints, how long it blocks training, how long it takes to
    be complete, and its size. They are temporarily in `folder`, on the disk to measure."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".device-check-") as checkpoints:
        with Saver(Path(checkpoints), step.config, None, lambda: None, ()) as saver:
            for number in range(_SAVES):
                begin = time.perf_counter()
                meta = describe_checkpoint(step.config, step.mesh, number, _SAVES, tokenizer="none")
                saver.save(step.model, step.optimizer, meta)
                stall = time.perf_counter() - begin
                saver.wait()
                complete = time.perf_counter() - begin
        last = list_checkpoints(Path(checkpoints))[-1]
        size, damage = folder_bytes(last.folder), last.damage()
    yield Check("checkpoint, training waits", stall, unit="s")
    note = "written behind the running training"
    yield Check("checkpoint, complete after", complete, notes=(note,), unit="s")
    notes = (f"damaged on the disk: {', '.join(damage)}",) if damage else ()
    yield Check("checkpoint, size", size, "read back as written", not damage, notes, "B")


def determinism(config: RunConfig, mesh: Mesh) -> Iterator[Check]:
    """Yield whether repeated steps from the same state give the same bits."""
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    options = {"xla_gpu_deterministic_ops": True} if is_gpu else {}
    first, second = (_trained(config, mesh, options) for _ in range(2))
    differing = [name for name in first if first[name].tobytes() != second[name].tobytes()]
    notes = [f'{_DETERMINISTIC_STEPS} steps, as with "deterministic": true']
    if differing:
        notes.append(f"{len(differing)} arrays differ, such as {differing[0]}")
    value = "different bits" if differing else "same bits"
    yield Check("step taken twice", value, "same bits", not differing, tuple(notes))


def _trained(config: RunConfig, mesh: Mesh, options: Mapping[str, object]) -> dict[str, np.ndarray]:
    step = RunningStep.create(config, mesh, **options)
    step.run(_DETERMINISTIC_STEPS)
    return step.arrays()


def _random_batch(config: RunConfig) -> tuple[np.ndarray, np.ndarray]:
    train = config.train
    shape = train.gradient_accumulation_steps, train.microbatch_size, config.sequence_length
    rng = np.random.default_rng(train.seed)
    tokens = rng.integers(0, config.model.vocab_size, (2, *shape), np.int32)
    return tokens[0], tokens[1]


def dtypes(config: RunConfig) -> list[str]:
    """Return float32 and, if different, the run's compute dtype."""
    return list(dict.fromkeys(["float32", dtype_of(config.train).name]))


def release(step: RunningStep) -> None:
    """Free the memory of a step's state."""
    for array in jax.tree.leaves((named_arrays(step.model), named_arrays(step.optimizer))):
        array.delete()
