"""Forecast of a run on devices that may be absent: memory, FLOPs, tokens, disk and time, computed
from its two config files."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from rungs.checkpointing.checkpoint_folder import checkpoint_folders, most_needed
from rungs.checkpointing.load import starting_dtypes
from rungs.checkpointing.weights_file import BASE, IMPORTED
from rungs.common import disk, errors
from rungs.common.run_log import log
from rungs.common.shown_text import format_bytes
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, RunConfig, errors_in_files_of
from rungs.config.sharding_config import ShardingConfig
from rungs.config.train_config import TrainConfig
from rungs.data.catalog import dataset_folder
from rungs.data.tokens.dataset import TRAIN, Dataset, split_file
from rungs.data.tokens.loader import TrainingData
from rungs.model.attention import check_kernel
from rungs.model.kernels import float8
from rungs.optim.precision import dtype_of, resolve_compute_dtype
from rungs.parallel import target_device
from rungs.parallel.devices import indivisible_batch
from rungs.parallel.sharding import Layout
from rungs.planning import advice
from rungs.planning.communication import Communication, abstract_layout, communication_of
from rungs.planning.flops import (
    Flops,
    ParameterCounts,
    count_active_parameters,
    count_parameters,
    hardware_flops_per_token,
    teacher_flops_per_token,
    training_flops_per_token,
)
from rungs.planning.hardware import Hardware
from rungs.planning.memory import Dtypes, Memory, as_stored, memory_of
from rungs.run import metrics, records
from rungs.run.folder import RunFolder
from rungs.step.state import AbstractState, shapes_of

_RECENT_STEPS = 100
"""Recorded steps from which the throughput is taken."""


class Tokens(NamedTuple):
    """Numbers of tokens that a run trains on."""

    per_step: int
    """In the largest step."""
    steps: int | None
    """Without the dataset those of min_train_tokens or max_steps; None if neither is set."""
    planned: int | None
    """Tokens of all steps."""
    done: int
    """Tokens in the run's metrics."""
    in_datasets: dict[str, int | None]
    """Training tokens of each dataset; None if it is not available yet."""
    of_datasets: dict[str, int]
    """Tokens of each dataset that the run reads, if its mixture changes and all are available."""
    padding: dict[str, float]
    """Share of padding in each dataset's sequences, if all are available."""

    def within(
        self,
        config: RunConfig,
        seconds: float,
        throughput: "Throughput",
        decided: Sequence[records.Length],
    ) -> Self:
        """Return the numbers for a run that ends after this many seconds: its own decision or,
        before that, as many as the throughput allows."""
        tokens = int(seconds * throughput.tokens_per_second)
        fitting = max(config.train.steps_of(tokens // config.sequence_length), 1)
        steps = decided[-1].total_steps if decided else fitting
        steps = min(steps, self.steps or steps)
        return self._replace(steps=steps, planned=config.tokens_before(steps))


class Throughput(NamedTuple):
    """Tokens per second over all devices."""

    tokens_per_second: float
    reason: str
    """Source of the figure."""


class Speed(NamedTuple):
    """FLOP/s over all devices."""

    flops: float
    """As `flops.training_flops_per_token` counts them."""
    reason: str
    """Source of the figure."""


class DiskSpace(NamedTuple):
    """Disk space of a run's checkpoints."""

    checkpoint_bytes: int
    checkpoints: int | None
    """Number that must fit at once: those kept, the best, and one being written. None if all are
    kept and their number is unknown."""
    free_bytes: float
    """Free space plus that of the run's own checkpoints; infinity if unknown."""
    base_bytes: int = 0
    """With LoRA: the weights under the adapter, saved once; 0 if they are the imported model."""

    @property
    def needed_bytes(self) -> int:
        return self.checkpoint_bytes * (self.checkpoints or 1) + self.base_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes


class Forecast(NamedTuple):
    """Memory, FLOPs, tokens, disk space and time of a run."""

    config: RunConfig
    """The run's config with the compute dtype resolved."""
    hardware: Hardware
    sharding: ShardingConfig
    parameters: ParameterCounts
    active: ParameterCounts
    memory: Memory
    stored: Dtypes | None
    """Dtypes of the weights that the run starts from; None if they are not available."""
    usable_bytes: float
    """Memory of each device that JAX may use."""
    flops: Flops
    model_flops_per_token: float
    """Those of the teacher included."""
    teacher_flops_per_token: float
    """Forward pass of a teacher beside each step."""
    tokens: Tokens
    disk: DiskSpace
    datasets: dict[str, Dataset]
    """The run's datasets that are available."""
    communication: Communication | None
    """Communication of a step; None on one device, if unknown, or if the throughput is known."""
    uncounted: str
    """Why the communication between devices is unknown."""
    speed: Speed | None = None
    """None if the device's FLOP/s are unknown."""
    throughput: Throughput | None = None
    """None if the device's FLOP/s are unknown."""
    is_assumed: bool = True
    """Whether speed and throughput come from an assumed utilization, not from measurements."""
    price_per_device_hour: float | None = None
    """Price in any currency."""

    @property
    def devices(self) -> int:
        return math.prod(self.sharding.sizes)

    @property
    def step_flops(self) -> float:
        """FLOPs of the largest step."""
        return self.model_flops_per_token * self.tokens.per_step

    @property
    def missing_datasets(self) -> list[str]:
        return [name for name in self.config.train.datasets if name not in self.datasets]

    def remedies(self) -> list[str]:
        """Return lines with edits that would fit into memory."""
        mesh = abstract_layout(self.sharding).mesh
        with target_device.trace_for(self.hardware.target):
            return advice.remedies(self.config, mesh, self.usable_bytes, self.stored)

    def larger_microbatch(self) -> advice.Edit | None:
        """Return the largest microbatch that a GPU has memory for, if larger than the run's, as it
        is faster. None with experts, whose load-balancing loss depends on the microbatch."""
        if self.hardware.platform != "gpu" or self.config.model.n_experts:
            return None
        return self._advised(advice.larger_microbatch)

    def larger_step(self) -> advice.Edit | None:
        """Return the most sequences that an accelerator has memory for, if a step is one
        microbatch."""
        return None if self.hardware.platform == "cpu" else self._advised(advice.larger_step)

    def _advised(self, advise: Callable[..., advice.Edit | None]) -> advice.Edit | None:
        mesh = abstract_layout(self.sharding).mesh
        with target_device.trace_for(self.hardware.target):
            return advise(self.config, mesh, self.usable_bytes, self.stored)

    @property
    def fits_memory(self) -> bool:
        return self.memory.total <= self.usable_bytes

    @property
    def tokens_per_parameter(self) -> float | None:
        planned = self.tokens.planned
        return None if planned is None else planned / self.active.total

    @property
    def seconds_left(self) -> float | None:
        planned = self.tokens.planned
        if planned is None or self.throughput is None:
            return None
        return max(planned - self.tokens.done, 0) / self.throughput.tokens_per_second

    @property
    def price_per_hour(self) -> float | None:
        """Price of all devices; a CPU's virtual devices are one machine."""
        price, is_cpu = self.price_per_device_hour, self.hardware.platform == "cpu"
        return None if price is None else price * (1 if is_cpu else self.devices)

    @property
    def cost_left(self) -> float | None:
        """Cost of the seconds left."""
        price, seconds = self.price_per_hour, self.seconds_left
        return None if price is None or seconds is None else price * seconds / 3600


def forecast(
    run: RunFolder,
    config: RunConfig,
    hardware: Hardware,
    sharding: ShardingConfig,
    datasets_dir: Path,
    utilization: float,
    throughput: Throughput | None = None,
) -> Forecast:
    """Return a run's forecast on devices that may be absent. `sharding` must have both sizes;
    `utilization` is the assumed share of peak, in `flops.training_flops_per_token`, if the
    throughput is unknown. Raises UserError with a line per conflict of model, training, devices and
    datasets."""
    with target_device.trace_for(hardware.target):
        train = resolve_compute_dtype(config.train).model_copy(update={"sharding": sharding})
        untimed = _without_time(run, RunConfig(config.model, train), hardware, datasets_dir)
    if throughput is not None:
        untimed = untimed._replace(communication=None, uncounted="", is_assumed=False)
    speed = _speed(untimed, utilization, throughput)
    throughput = throughput or (speed and _throughput(untimed, speed))
    tokens = untimed.tokens
    if train.max_minutes is not None and throughput is not None:
        decided = records.read_lengths(run, train.max_minutes)
        tokens = tokens.within(untimed.config, 60 * train.max_minutes, throughput, decided)
    return untimed._replace(speed=speed, throughput=throughput, tokens=tokens)


def _without_time(
    run: RunFolder, config: RunConfig, hardware: Hardware, datasets_dir: Path
) -> Forecast:
    model, train = config
    assert train.sharding is not None
    layout = abstract_layout(train.sharding)
    _check_divisibility(run, config, layout)
    shapes = shapes_of(model, train.lora)
    folders = {name: dataset_folder(name, datasets_dir) for name in train.datasets}
    here = (item for item in folders.items() if (item[1] / split_file(TRAIN)).exists())
    datasets = {name: Dataset(name, folder) for name, folder in here}
    tokens = _tokens(run, config, datasets)
    stored = starting_dtypes(run, config)
    communication, uncounted = _communication(config, layout, hardware)
    space = disk_space(run, config, tokens.steps, stored)
    sharing = layout.mesh.size if hardware.platform == "cpu" else 1  # of the machine's memory
    return Forecast(
        config=config,
        hardware=hardware,
        sharding=train.sharding,
        parameters=count_parameters(shapes),
        active=count_active_parameters(shapes, model),
        memory=memory_of(config, layout.mesh, stored),
        stored=stored,
        usable_bytes=hardware.usable_bytes / sharing,
        flops=hardware_flops_per_token(config),
        model_flops_per_token=training_flops_per_token(config),
        teacher_flops_per_token=teacher_flops_per_token(config),
        tokens=tokens,
        disk=space if hardware.is_here else space._replace(free_bytes=math.inf),
        datasets=datasets,
        communication=communication,
        uncounted=uncounted,
    )


def memory_on_same_devices(planned: Forecast, config: RunConfig) -> Memory:
    """Return the memory of another run on the devices, mode and dtype of a forecast."""
    with target_device.trace_for(planned.hardware.target):
        return memory_of(config, abstract_layout(planned.sharding).mesh)


def recorded_throughput(run: RunFolder) -> Throughput | None:
    """Return the median throughput of the latest steps in a run's metrics."""
    steps = metrics.read(run.metrics)[-_RECENT_STEPS:]
    found = [step.tokens_per_second for step in steps if step.tokens_per_second]
    return Throughput(statistics.median(found), "as in the run's latest steps") if found else None


def _check_divisibility(run: RunFolder, config: RunConfig, layout: Layout) -> None:
    lines = [f"{MODEL_FILE}: {line}" for line in layout.problems(config.model)]
    lines += [f"{TRAIN_FILE}: {line}" for line in indivisible_batch(*config, layout.mesh)]
    with errors_in_files_of(run.path):
        if lines:
            raise errors.UserError("\n".join(lines))
        float8.check_device(config.train)
        check_kernel(config.model, config.train, dtype_of(config.train))


def _tokens(run: RunFolder, config: RunConfig, datasets: dict[str, Dataset]) -> Tokens:
    train, steps, of_datasets, padding = config.train, None, dict[str, int](), dict[str, float]()
    if len(datasets) == len(train.datasets):
        with errors_in_files_of(run.path):
            data = TrainingData(config, datasets)
        steps, padding = data.total_steps, data.padding
        of_datasets = data.dataset_tokens(steps)
    elif train.min_train_tokens != -1:
        steps = train.total_steps(config.least_steps(train.min_train_tokens))
    else:
        steps = train.max_steps
    recorded = metrics.read(run.metrics)
    in_datasets = {
        name: datasets[name].description.splits[TRAIN].tokens if name in datasets else None
        for name in train.datasets
    }
    planned = None if steps is None else config.tokens_before(steps)
    done = recorded[-1].tokens_seen if recorded else 0
    per_step = config.most_tokens_per_step
    return Tokens(per_step, steps, planned, done, in_datasets, of_datasets, padding)


def _communication(
    config: RunConfig, layout: Layout, hardware: Hardware
) -> tuple[Communication | None, str]:
    """Return a step's communication, or None and why it is unknown."""
    if layout.mesh.size == 1:
        return None, ""
    if hardware.links is None:
        return None, f"the links of {hardware.name} are not known"
    try:
        return communication_of(config, layout, hardware.links), ""
    except ValueError as error:
        return None, str(error)


def _speed(untimed: Forecast, utilization: float, throughput: Throughput | None) -> Speed | None:
    if throughput is not None:
        flops = throughput.tokens_per_second * untimed.model_flops_per_token
        return Speed(flops, throughput.reason)
    peak = _peak(untimed)
    if peak is None:
        return None
    reason = f"assuming {100 * utilization:.3g}% of {untimed.devices} × {peak / 1e12:,.1f} TFLOP/s"
    flops, in_step = utilization * peak * untimed.devices, untimed.step_flops
    if untimed.communication is not None:
        flops = in_step / untimed.communication.step_seconds(in_step / flops)
    return Speed(flops, reason)


def _peak(untimed: Forecast) -> float | None:
    """Return a device's peak FLOP/s, in FP8 if the run uses that."""
    train, hardware, flops = untimed.config.train, untimed.hardware, untimed.flops
    peak, float8_peak = hardware.peak(dtype_of(train)), hardware.peak_of_bits(8)
    if peak is None or not train.uses_float8 or float8_peak is None:
        return peak
    in_layers = flops.layers.total / flops.total
    return 1 / (in_layers / float8_peak + (1 - in_layers) / peak)


def _throughput(untimed: Forecast, speed: Speed) -> Throughput:
    seconds, reason = untimed.step_flops / speed.flops, speed.reason
    if (update_seconds := _least_update_seconds(untimed)) > seconds:
        seconds, reason = update_seconds, "limited by memory bandwidth"
    return Throughput(untimed.tokens.per_step / seconds, reason)


def _least_update_seconds(untimed: Forecast) -> float:
    """Return the time in which the optimizer reads and writes all weights and moments once, and
    reads their gradients, except LoRA's few."""
    memory, bandwidth = untimed.memory, untimed.hardware.bandwidth
    gradients = 0 if untimed.config.train.lora else memory.weights
    moved = 2 * (memory.weights + memory.moments) + gradients
    return moved / bandwidth if bandwidth else 0.0


def disk_space(
    run: RunFolder, config: RunConfig, steps: int | None, stored: Dtypes | None
) -> DiskSpace:
    """Return the disk space that a run's checkpoints need and have. `steps` is the run's total,
    None if unknown; `stored` is as for `memory_of`."""
    train = config.train
    saved = None if steps is None else _checkpoints(train, steps)
    counts = [count for count in (most_needed(train.keep_checkpoints), saved) if count is not None]
    folders = (*checkpoint_folders(run.checkpoints), *run.checkpoints.glob(f"{BASE}*"))
    free = disk.free_bytes(run.path) + sum(map(disk.folder_bytes, folders))
    each, base = _saved_bytes(config, stored)
    base *= train.start_from != IMPORTED
    return DiskSpace(each, min(counts, default=None), free, base)


def _checkpoints(train: TrainConfig, steps: int) -> int:
    """Return how many checkpoints a run saves, if none is due by time."""
    interval, last = train.checkpoint_interval, steps - 1
    more = sum(step < last and step % interval > 0 for step in train.more_checkpoints)
    return math.ceil(last / interval) + 1 + more


def warn_if_short(run: RunFolder, config: RunConfig, steps: int, stored: Dtypes | None) -> None:
    """Log a warning if a run's checkpoints will not fit on its disk."""
    space = disk_space(run, config, steps, stored)
    if not space.fits:
        needed, each = format_bytes(space.needed_bytes), format_bytes(space.checkpoint_bytes)
        log.warning(
            f"{run.checkpoints}: its checkpoints need {needed} ({space.checkpoints} at the same"
            f" time, {each} each), but only {format_bytes(space.free_bytes)} can be used for them;"
            f" {remedy(config.train)}"
        )


def remedy(train: OptimizationConfig) -> str:
    """Return what to do if a run's checkpoints do not fit on its disk."""
    if train.keep_checkpoints == -1:
        return "free some space, or keep fewer: keep_checkpoints is -1, all"
    is_least = most_needed(train.keep_checkpoints) == most_needed(1)
    return "free some space" + (", or lower keep_checkpoints" if not is_least else "")


def state_bytes(config: RunConfig, stored: Dtypes | None) -> int:
    """Return the bytes of a run's weights and optimizer state."""
    return sum(_saved_bytes(config, stored))


def _saved_bytes(config: RunConfig, stored: Dtypes | None) -> tuple[int, int]:
    """Return the bytes of a checkpoint, but for small files, and of the weights under LoRA."""
    train = config.train.model_copy(update={"sharding": None})
    with target_device.trace_for(target_device.Target("cpu")):  # without vocabulary padding
        mesh = abstract_layout(ShardingConfig(data=1)).mesh
        state = AbstractState(RunConfig(config.model, train), 1, mesh)
    weights = as_stored(state, stored or {})
    base = [weights.pop(name) for name in weights.keys() - state.trained] if train.lora else []
    each = (*weights.values(), *state.optimizer.values())
    saved, kept = (sum(a.size * a.dtype.itemsize for a in part) for part in (each, base))
    return saved, kept
