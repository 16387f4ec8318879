"""Memory of a training step on each device, by component, computed without running it. Advice if
it is too much: where memory goes, and which edits of `train.json` keep the global batch and need
less."""

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from rungs.common.errors import OUT_OF_MEMORY_SIGNS, RunFailure
from rungs.common.machine import memory_bytes
from rungs.common.run_log import log
from rungs.config.base import AUTO
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import Remat
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.config.train_config import TrainConfig
from rungs.model.gpt import GPT
from rungs.model.remat import LayerLoop, kept_scores, layer_loop, settings_from
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel import gpu_settings, target_device
from rungs.parallel.sharding import BLOCKS, TOKEN_AXES, Layout, size_along
from rungs.planning import peaks
from rungs.planning.flops import model_beside
from rungs.step.state import AbstractArrays, AbstractModel, AbstractState, shapes_of

Dtypes = Mapping[str, str]
"""NumPy names of dtypes, by parameter name."""
USABLE_SHARE = 0.9
"""Share of a device's memory that an edit may use; the rest is for what is not counted."""
MAX_EDITS = 3


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device during a step."""

    weights: int
    moments: int
    """Optimizer state."""
    gradients: int
    """Gradients of the layers for one microbatch."""
    accumulator: int
    """Sum of the gradients over microbatches, if there are several."""
    gathered: int
    """Full copies of one layer's sharded weights; in FP8 also all layers' kernels in 8 bits."""
    activations: int
    """Residuals of a microbatch: values kept from the forward for the backward pass."""
    logits: int
    """A chunk of logits and what exists with it: gathered output head, gradients of the head."""
    layer: int
    """Arrays of one layer's backward pass, which don't coexist with the logits."""
    batch: int
    """Token ids of a step."""
    teacher: int
    """Weights of a teacher, and what it predicts for a step."""
    error: float
    """Relative error of the total against the compiled step."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by component."""
        parts = dataclasses.asdict(self)
        del parts["error"]
        return parts if self.teacher else {n: size for n, size in parts.items() if n != "teacher"}

    @property
    def total(self) -> int:
        """Peak memory."""
        parts = self.parts
        logits, layer = parts.pop("logits"), parts.pop("layer")
        return sum(parts.values()) + max(logits, layer)


_FLOAT8_ERROR = 0.25
"""Relative error in FP8: activations are counted as in compute_dtype, but a compiled step of 1.1B
parameters needs a fifth less."""
MEMORY_LABELS = {
    "accumulator": "gradient sum",
    "gathered": "all-gathered",
    "layer": "backward",
    "batch": "token ids",
}
"""Labels in tables for fields of `Memory`, where different."""


def memory_of(config: RunConfig, mesh: Mesh, stored: Dtypes | None = None) -> Memory:
    """Return the memory of a run's step; arguments as for `MemoryEstimates`."""
    remat = layer_loop(config.train, config.model).remat
    return MemoryEstimates(config, mesh, [remat], stored).of(config)


class MemoryEstimates:
    """The memory of a run's step for several values of `remat` and `microbatch_size`, sharing
    traces, which take most of the time. Weights, moments and gradients are exact; activations are
    the residuals of the loss; `logits` and `layer`, the temporary arrays, are rules that agree with
    the compiler's own analysis."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        settings: Sequence[Remat],
        stored: Dtypes | None = None,
    ) -> None:
        """Trace the step. The mesh must be in the mode of `config.train.sharding`, and abstract for
        planned devices (`target_device.trace_for`). `settings` are the values of `remat` that `of`
        may get. `stored` has the starting weights' dtypes in their file, which frozen ones keep
        with LoRA."""
        self._mesh = mesh
        self._microbatch_size = config.train.microbatch_size
        self._abstract = AbstractState(config, 1, mesh)
        self._weights = as_stored(self._abstract, stored or {})
        state = self._abstract.fill(self._weights, self._abstract.optimizer)  # type: ignore[arg-type]
        needed: set[Remat] = {"none", "dots", *settings} if config.model.n_layers else {*settings}
        self._kept = {
            remat: peaks.activations_of(
                RunConfig(config.model, config.train.model_copy(update={"remat": remat})),
                mesh,
                *state,
            )
            for remat in needed
        }

    def of(self, config: RunConfig) -> Memory:
        """Return the memory of a run that differs at most in `remat`, `microbatch_size` and
        `gradient_accumulation_steps`."""
        rows, traced = config.train.microbatch_size, self._microbatch_size
        kept = {
            remat: peaks.Activations(*(size * rows // traced for size in sizes))
            for remat, sizes in self._kept.items()
        }
        peak = (peaks.CpuPeak if target_device.platform() == "cpu" else peaks.AcceleratorPeak)(
            config, self._mesh, self._weights, self._gradients_of(config), kept
        )
        return Memory(
            weights=peaks.bytes_per_device(self._weights.values()),
            moments=peaks.bytes_per_device(self._abstract.optimizer.values()),
            gradients=peak.layer_gradients,
            accumulator=peak.gradients if peak.accumulates else 0,
            gathered=peak.gathered_layers + self._float8_bytes(config),
            activations=peak.activation_bytes,
            logits=peak.logits_bytes,
            layer=peak.layer_bytes,
            batch=peak.batch,
            teacher=self._teacher_bytes(config),
            error=max(peak.error, _FLOAT8_ERROR if config.train.uses_float8 else 0),
        )

    def _teacher_bytes(self, config: RunConfig) -> int:
        """Return the bytes of the teacher and its predictions; see `flops.model_beside`."""
        train, layout = config.train, Layout.of(config.train.sharding, self._mesh)
        if train.teacher is None:
            return 0
        values, weights = (train.teacher_top_k or 0) * 8 + 4, 0
        if teacher := model_beside(train):
            values = config.model.vocab_size * 4
            abstract = AbstractModel(teacher, layout)
            weights = peaks.bytes_per_device(abstract.weights.values())
        devices = size_along(self._mesh, *TOKEN_AXES)
        return weights + config.most_tokens_per_step * values // devices

    def _float8_bytes(self, config: RunConfig) -> int:
        """Return the bytes of the blocks' kernels in 8 bits, if a run uses FP8."""
        in_blocks = (n for n in self._weights if n.startswith(BLOCKS) and n.endswith(".kernel"))
        kernels = (self._weights[name] for name in in_blocks)
        return peaks.bytes_per_device(kernels) // 4 if config.train.uses_float8 else 0

    def _gradients_of(self, config: RunConfig) -> AbstractArrays:
        """Return a microbatch's gradients. Those of a single microbatch are reduced as soon as they
        are computed, and then in the layout for updates."""
        layout = Layout.of(config.train.sharding, self._mesh)
        is_single = config.train.microbatches_per_step == 1
        weights = self._abstract.weights_in(layout.for_updates if is_single else layout)
        return {name: weights[name] for name in self._abstract.trained}


def as_stored(abstract: AbstractState, stored: Dtypes) -> AbstractArrays:
    """Return the weights of a state, with frozen ones in their stored dtypes."""
    return {
        name: array
        if name in abstract.trained or name not in stored
        else jax.ShapeDtypeStruct(array.shape, jnp.dtype(stored[name]), sharding=array.sharding)
        for name, array in abstract.weights.items()
    }


def state_bytes(model: GPT, optimizer: SkippingOptimizer) -> int:
    """Return the bytes per device of a model, its optimizer state, a gradient and its sum."""
    trainable = nnx.state(model, optimizer.wrt)
    states = nnx.state(model), nnx.state(optimizer), trainable, trainable
    return peaks.bytes_per_device(jax.tree.leaves(states))


def format_bytes(size: float) -> str:
    """Return bytes in MB or GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


class Edit(NamedTuple):
    """Keys of `train.json` to change, and the memory of the changed run."""

    keys: dict[str, Any]
    memory: Memory

    def __str__(self) -> str:
        return f"{json.dumps(self.keys)[1:-1]}  ({format_bytes(self.memory.total)})"


@contextlib.contextmanager
def report_out_of_memory(
    config: RunConfig, mesh: Mesh, stored: Dtypes | None = None
) -> Iterator[None]:
    """Turn JAX's out-of-memory error or a MemoryError into a RunFailure with advice. In this
    module, `stored` is as for `memory_of`."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        has_sign = any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)
        if has_sign or isinstance(error, MemoryError):
            raise RunFailure("\n".join(["out of memory", *advice(config, mesh, stored)])) from error
        raise


def warn_if_too_large(config: RunConfig, mesh: Mesh, stored: Dtypes | None = None) -> None:
    """Log advice if a run needs too much memory on a CPU, where the system kills a process that
    runs out of memory without any message."""
    limit, is_cpu = device_bytes(mesh), mesh.devices.flat[0].platform == "cpu"
    may_not_fit = is_cpu and _rough_bytes(config) >= mesh.size * limit / 4
    if may_not_fit and memory_of(config, mesh, stored).total > limit:
        for line in ["this run needs more memory than there is", *advice(config, mesh, stored)]:
            log.warning("%s", line)


def advice(config: RunConfig, mesh: Mesh, stored: Dtypes | None = None) -> list[str]:
    """Return lines that say where a step's memory goes and which edits would fit."""
    memory, limit = memory_of(config, mesh, stored), device_bytes(mesh)
    parts = memory.parts
    parts["layer"] = max(memory.layer - memory.logits, 0)  # the two do not overlap
    devices = "one device" if mesh.size == 1 else f"each of {mesh.size} devices"
    total = format_bytes(memory.total)
    lines = [f"a step needs about {total} on {devices} with {format_bytes(limit)}:"]
    for name, size in parts.items():
        lines.append(f"  {MEMORY_LABELS.get(name, name):12} {format_bytes(size):>10}")
    if mesh.devices.flat[0].platform == "gpu":
        lines.append(gpu_settings.share_advice("a GPU's memory"))
    # the run ran out of memory, so it needs more than this estimate
    return lines + remedies(config, mesh, min(limit, memory.total), stored)


def remedies(
    config: RunConfig, mesh: Mesh, limit: float, stored: Dtypes | None = None
) -> list[str]:
    """Return lines with the edits that would fit into `limit` bytes per device."""
    if fitting := list(edits(config, mesh, USABLE_SHARE * limit, stored)):
        return [
            "these edits of train.json would fit, with the same global batch:",
            *(f"  {edit}" for edit in fitting),
        ]
    return [
        "no combination of microbatch_size and remat fits: use more devices that share the weights"
        ' ("sharding": {"mode": "fsdp"}), a shorter sequence_length, an optimizer with less state'
        " (lion, sgd, adafactor) or a smaller model"
    ]


def edits(
    config: RunConfig, mesh: Mesh, limit: float, stored: Dtypes | None = None
) -> Iterator[Edit]:
    """Yield the largest microbatch that fits into `limit` bytes per device for each remat setting
    and sharding mode, fastest first, at most `MAX_EDITS`."""
    shardings = _shardings(config, mesh)
    found = (_edits_of_sharding(config, mesh, limit, keys, stored) for keys in shardings)
    yield from itertools.islice(itertools.chain.from_iterable(found), MAX_EDITS)


def _edits_of_sharding(
    config: RunConfig, mesh: Mesh, limit: float, sharding: dict[str, Any], stored: Dtypes | None
) -> Iterator[Edit]:
    own, model = config.train, config.model
    base = TrainConfig.model_validate({**own.as_json(), **sharding})
    chosen = layer_loop(own, model)
    settings = settings_from(chosen.remat)
    estimates = MemoryEstimates(RunConfig(model, base), mesh, settings, stored)
    for remat in settings:
        loop = chosen if remat == chosen.remat and not sharding else LayerLoop(remat, 1)
        for size in _microbatch_sizes(base, base.microbatch_size, mesh):
            split = _split(base, size) if size != base.microbatch_size else {}
            train = base.model_copy(update=loop.as_keys() | split)
            memory = estimates.of(RunConfig(model, train))
            if memory.total <= limit:
                yield Edit(sharding | _loop_keys(loop, own, train, model) | split, memory)
                break


def larger_microbatch(
    config: RunConfig, mesh: Mesh, limit: float, stored: Dtypes | None = None
) -> Edit | None:
    """Return the largest microbatch, above the run's, that fits `limit` bytes per device."""
    model, train = config
    sizes = _microbatch_sizes(train, train.sequences_per_step, mesh)
    larger = [size for size in sizes if size > train.microbatch_size]
    if not larger:
        return None
    estimates = MemoryEstimates(config, mesh, [layer_loop(train, model).remat], stored)
    for keys in (_split(train, size) for size in larger):
        memory = estimates.of(RunConfig(model, train.model_copy(update=keys)))
        if memory.total <= USABLE_SHARE * limit:
            return Edit(keys, memory)
    return None


def _split(train: TrainConfig, size: int) -> dict[str, Any]:
    """Return the keys for microbatches of this size with the same sequences per step."""
    steps = train.sequences_per_step // size
    return {"microbatch_size": size, "gradient_accumulation_steps": steps}


def _loop_keys(
    loop: LayerLoop, own: TrainConfig, edited: TrainConfig, model: ModelConfig
) -> dict[str, Any]:
    """Return the keys that an edit needs to get a loop. `own` has values for "auto", which the
    device may choose differently for the edited run."""
    chosen = layer_loop(own, model)
    if _loop_of({}, own, model) != chosen:
        return dict(loop.as_keys().items() - chosen.as_keys().items())
    fewest: list[dict[str, Any]] = [{}, {"remat": loop.remat}]
    return next((it for it in fewest if _loop_of(it, edited, model) == loop), loop.as_keys())


def _loop_of(keys: dict[str, Any], train: TrainConfig, model: ModelConfig) -> LayerLoop:
    """Return the loop of a run with these as its only keys for it."""
    return layer_loop(train.model_copy(update={"remat": AUTO, "scan_unroll": AUTO} | keys), model)


def device_bytes(mesh: Mesh) -> float:
    """Return the memory of each device; virtual CPU devices share the machine's."""
    device = mesh.local_devices[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return memory_bytes() / len(mesh.local_devices)


def _shardings(config: RunConfig, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Yield keys that change where a step is computed, not its result."""
    yield {}
    is_dp = mesh.size > 1 and (config.train.sharding or ShardingConfig()).mode == "dp"
    if is_dp and not Layout(mesh, "fsdp").problems(config.model):
        yield {"sharding": {"mode": "fsdp", "data": mesh.size}}


def _microbatch_sizes(train: TrainConfig, largest: int, mesh: Mesh) -> Iterator[int]:
    """Yield sizes that divide the step's sequences and fill the devices evenly, largest first."""
    for size in range(largest, 0, -1):
        if train.sequences_per_step % size == 0 and size % mesh.shape["data"] == 0:
            yield size


def _rough_bytes(config: RunConfig) -> int:
    """Return an instant estimate of the bytes over all devices: weights, moments, gradients, and
    per token and layer ten vectors and, with dropout, the attention scores."""
    model, train = config
    numbers = sum(map(math.prod, shapes_of(model).values()))
    tokens = train.microbatch_size * config.sequence_length
    kept = 10 * model.emb_dim + kept_scores(train, model)
    return 4 * (5 * numbers + tokens * model.n_layers * kept)
