"""What a run will take, before it takes it: read from its two files, with nothing computed."""

import math
import shutil
import statistics
from pathlib import Path
from typing import NamedTuple

from rungs.checkpointing.checkpoint_folder import CHECKPOINT_GLOB
from rungs.common.errors import UserError
from rungs.common.paths import is_there
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, RunConfig
from rungs.config.train_config import ShardingConfig, TrainConfig, indivisible_microbatch
from rungs.data.catalog import folder_of
from rungs.data.dataset import TRAIN, Dataset, split_file
from rungs.data.loader import TrainingData
from rungs.optim.precision import dtype_of, resolve_compute_dtype
from rungs.parallel import target_device
from rungs.planning import flops as flops_module
from rungs.planning.communication import layout_without_devices
from rungs.planning.flops import Flops, Parameters
from rungs.planning.hardware import Hardware
from rungs.planning.memory import Memory, memory_of
from rungs.planning.oom_advice import remedies
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.step.state import shapes_of

_LATEST_STEPS = 100
"""Whose pace is taken for that of the steps to come."""


class Tokens(NamedTuple):
    """What a run trains on."""

    per_step: int
    steps: int | None
    """None where that depends on a dataset which is not there yet."""
    done: int
    """That its metrics record."""
    in_datasets: dict[str, int | None]
    """Tokens for training in each dataset; None where it is not there yet."""

    @property
    def planned(self) -> int | None:
        return None if self.steps is None else self.steps * self.per_step


class Disk(NamedTuple):
    """What a run's checkpoints take."""

    checkpoint_bytes: int
    checkpoints: int | None
    """That stand at once, at most: those that are kept, the best, and one that is being written.
    None where all are kept and nobody knows how many there will be."""
    free_bytes: int
    """With those that the run's own checkpoints have taken already."""

    @property
    def needed_bytes(self) -> int:
        return self.checkpoint_bytes * (self.checkpoints or 1)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes


class Pace(NamedTuple):
    """How fast a run goes on all devices together."""

    tokens_per_second: float
    reason: str
    """Why that is thought."""


class Speed(NamedTuple):
    """How fast all devices together compute."""

    flops: float
    """Per second, by `estimate.conventional_flops`."""
    reason: str
    """Why that is thought."""


class Forecast(NamedTuple):
    """All of it."""

    config: RunConfig
    """With a type to compute in."""
    hardware: Hardware
    sharding: ShardingConfig
    parameters: Parameters
    active: Parameters
    memory: Memory
    usable_bytes: float
    """Of each device's memory."""
    flops: Flops
    conventional_flops: float
    tokens: Tokens
    disk: Disk
    datasets: dict[str, Dataset]
    """Those of the run's that are here."""
    speed: Speed | None = None
    """None where nobody knows what the device can do."""
    pace: Pace | None = None
    """Likewise."""

    @property
    def devices(self) -> int:
        return math.prod(self.sharding.sizes)

    @property
    def missing(self) -> list[str]:
        """The run's datasets that are not here."""
        return [name for name in self.config.train.datasets if name not in self.datasets]

    def remedies(self) -> list[str]:
        """Lines: what would fit into memory."""
        mesh = layout_without_devices(self.sharding).mesh
        with target_device.trace_for(self.hardware.target):
            return remedies(self.config, mesh, self.usable_bytes)

    @property
    def fits_memory(self) -> bool:
        return self.memory.total <= self.usable_bytes

    @property
    def fits(self) -> bool:
        return self.fits_memory and self.disk.fits

    @property
    def tokens_per_parameter(self) -> float | None:
        planned = self.tokens.planned
        return None if planned is None else planned / self.active.total

    @property
    def seconds_left(self) -> float | None:
        planned = self.tokens.planned
        if planned is None or self.pace is None:
            return None
        return max(planned - self.tokens.done, 0) / self.pace.tokens_per_second


def forecast(
    run: RunFolder,
    config: RunConfig,
    hardware: Hardware,
    sharding: ShardingConfig,
    datasets_dir: Path,
    utilisation: float,
    pace: Pace | None = None,
) -> Forecast:
    """What a run will take on devices that need not be there.

    Args:
        sharding: with both sizes given.
        utilisation: share of the devices' peak that the run is taken to reach, by
            `estimate.conventional_flops`.
        pace: where it is known.

    Raises:
        UserError: a line for each reason why model, training, devices and datasets do not go
            together.
    """
    with target_device.trace_for(hardware.target):
        train = resolve_compute_dtype(config.train).model_copy(update={"sharding": sharding})
        found = _without_pace(run, RunConfig(config.model, train), hardware, datasets_dir)
    speed = _speed(found, utilisation, pace)
    return found._replace(speed=speed, pace=pace or (speed and _pace(found, speed)))


def _without_pace(
    run: RunFolder, config: RunConfig, hardware: Hardware, datasets_dir: Path
) -> Forecast:
    model, train = config
    assert train.sharding is not None
    layout = layout_without_devices(train.sharding)
    _refuse_misfits(run, config, layout.problems(model))
    shapes = shapes_of(model, train.lora)
    datasets = _datasets(train, datasets_dir)
    tokens = _tokens(run, config, datasets)
    return Forecast(
        config=config,
        hardware=hardware,
        sharding=train.sharding,
        parameters=flops_module.parameters(shapes),
        active=flops_module.active_parameters(shapes, model),
        memory=memory_of(config, layout.mesh),
        usable_bytes=_usable_bytes(hardware, train.sharding),
        flops=flops_module.flops(config, layout.padded_vocab_size(model.vocab_size)),
        conventional_flops=flops_module.conventional_flops(shapes, model, config.sequence_length),
        tokens=tokens,
        disk=_disk(run, config, tokens.steps),
        datasets=datasets,
    )


def memory_like(planned: Forecast, config: RunConfig) -> Memory:
    """What another run takes on the same devices, in the same mode and type."""
    with target_device.trace_for(planned.hardware.target):
        return memory_of(config, layout_without_devices(planned.sharding).mesh)


def measured_pace(run: RunFolder) -> Pace | None:
    """That of the latest steps that a run's metrics hold."""
    steps = metrics.read(run.metrics)[-_LATEST_STEPS:]
    found = [step.tokens_per_second for step in steps if step.tokens_per_second]
    return Pace(statistics.median(found), "as the latest steps took") if found else None


def _datasets(train: TrainConfig, datasets_dir: Path) -> dict[str, Dataset]:
    """Those that need not be built or downloaded."""
    folders = {name: folder_of(name, datasets_dir) for name in train.datasets}
    return {
        name: Dataset(name, folder)
        for name, folder in folders.items()
        if is_there(folder / split_file(TRAIN))
    }


def _refuse_misfits(run: RunFolder, config: RunConfig, of_layout: list[str]) -> None:
    train = config.train
    assert train.sharding is not None
    lines = [f"{MODEL_FILE}: {line}" for line in of_layout]
    if line := indivisible_microbatch(train, train.sharding.sizes[0]):
        lines.append(f"{TRAIN_FILE}: {line}")
    if lines:
        raise UserError("\n".join(f"{run.path}/{line}" for line in lines))


def _tokens(run: RunFolder, config: RunConfig, there: dict[str, Dataset]) -> Tokens:
    train, per_step = config.train, config.tokens_per_step
    steps: int | None
    if len(there) == len(train.datasets):
        steps = _training_data(run, config, there).total_steps
    elif train.min_train_tokens == -1:
        steps = None
    else:
        steps = math.ceil(train.min_train_tokens / per_step) * train.epochs
    recorded = metrics.read(run.metrics)
    return Tokens(
        per_step,
        steps,
        recorded[-1].tokens_seen if recorded else 0,
        {
            name: there[name].description.splits[TRAIN].tokens if name in there else None
            for name in train.datasets
        },
    )


def _training_data(run: RunFolder, config: RunConfig, datasets: dict[str, Dataset]) -> TrainingData:
    try:
        return TrainingData(config, datasets)
    except UserError as error:
        lines = str(error).splitlines()
        raise UserError("\n".join(f"{run.path}/{line}" for line in lines)) from None


def _disk(run: RunFolder, config: RunConfig, steps: int | None) -> Disk:
    train = config.train
    kept = None if train.keep_checkpoints == -1 else train.keep_checkpoints + 2
    made = None if steps is None else math.ceil((steps - 1) / train.checkpoint_interval) + 1
    counts = [count for count in (kept, made) if count is not None]
    own = sum(
        file.stat().st_size
        for folder in run.checkpoints.glob(CHECKPOINT_GLOB)
        for file in folder.rglob("*")
        if file.is_file()
    )
    return Disk(
        flops_module.checkpoint_bytes(config),
        min(counts, default=None),
        shutil.disk_usage(run.path).free + own,
    )


def _usable_bytes(hardware: Hardware, sharding: ShardingConfig) -> float:
    """Of each device; those of a CPU are virtual, and share its memory."""
    is_cpu = hardware.target.platform == "cpu"
    return hardware.usable_bytes / (math.prod(sharding.sizes) if is_cpu else 1)


def _speed(found: Forecast, utilisation: float, pace: Pace | None) -> Speed | None:
    if pace is not None:
        return Speed(pace.tokens_per_second * found.conventional_flops, pace.reason)
    peak = found.hardware.peak(dtype_of(found.config.train))
    if peak is None:
        return None
    reason = f"{100 * utilisation:.3g}% of {found.devices} × {peak / 1e12:,.1f} TFLOP/s"
    return Speed(utilisation * peak * found.devices, reason)


def _pace(found: Forecast, speed: Speed) -> Pace:
    seconds = found.conventional_flops * found.tokens.per_step / speed.flops
    reason = speed.reason
    if (moving := _seconds_to_update(found)) > seconds:
        seconds, reason = moving, "the weights' way through memory"
    return Pace(found.tokens.per_step / seconds, reason)


def _seconds_to_update(found: Forecast) -> float:
    """What a step takes at least, as the optimizer reads and writes all weights and moments."""
    memory, bandwidth = found.memory, found.hardware.bandwidth
    moved = 2 * (memory.weights + memory.moments) + memory.gradients
    return moved / bandwidth if bandwidth else 0.0
