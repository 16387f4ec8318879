"""Memory of a training step on each device, by component, computed without running it. Weights,
moments, gradients and what the backward pass keeps are exact, by tracing; one rule stands for the
arrays that the compiler adds, with an error measured on compiled steps (docs/planning.md). Axis
suffixes as in `rungs/model/gpt.py`."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import Remat
from rungs.config.run_config import RunConfig
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import chunk_tokens
from rungs.model.remat import layer_loop, periods
from rungs.objectives.table import objective_without_teacher
from rungs.optim.precision import dtype_of
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel import target_device
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.sharding import (
    BLOCKS,
    CONTEXT,
    DATA,
    HEAD,
    LOOKED_UP,
    TENSOR,
    TOKEN_AXES,
    TOKEN_EMBEDDING,
    Layout,
    sharded_axis,
    size_along,
)
from rungs.planning.flops import model_beside
from rungs.step.forward import compute_of, on_mesh
from rungs.step.objective import Microbatch
from rungs.step.state import AbstractArrays, AbstractModel, AbstractState

FLOAT32_BYTES = INT32_BYTES = 4
Dtypes = Mapping[str, str]
"""NumPy names of dtypes, by parameter name."""
ERRORS = {"cpu": 0.2, "gpu": 0.3, "tpu": 0.12}
"""Relative error of the total, by platform: docs/planning.md says what it was measured against."""
LONG_PATTERN_ERROR = 0.2
"""On TPUs, if layers follow a pattern of more than two, which are compiled together."""
MEMORY_LABELS = {"accumulator": "gradient sum", "gathered": "all-gathered", "batch": "token ids"}
"""Labels in tables for fields of `Memory`, where different."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device during a step."""

    weights: int
    moments: int
    """Optimizer state."""
    gradients: int
    """Gradients of one microbatch."""
    accumulator: int
    """Sum of the gradients over microbatches, if there are several."""
    gathered: int
    """Full copies of the sharded weights outside the layers and of one layer; in FP8 also all
    layers' kernels in 8 bits."""
    activations: int
    """Residuals of a microbatch: values kept from the forward for the backward pass."""
    temporary: int
    """What exists besides at the peak: a chunk of logits with their gradient, before there are
    gradients of layers, or the values of one layer in its backward pass, if that is more."""
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
        return sum(self.parts.values())


class Activations(NamedTuple):
    """Bytes of activations on each device."""

    in_layers: int
    """Bytes in the loop over layers."""
    total: int


def memory_of(config: RunConfig, mesh: Mesh, stored: Dtypes | None = None) -> Memory:
    """Return the memory of a run's step; arguments as for `MemoryEstimates`."""
    return MemoryEstimates(config, mesh, stored).of(config)


class MemoryEstimates:
    """The memory of a run's step for several values of `remat` and `microbatch_size`, sharing
    traces, which take most of the time."""

    def __init__(self, config: RunConfig, mesh: Mesh, stored: Dtypes | None = None) -> None:
        """The mesh must be in the mode of `config.train.sharding`, and abstract for planned devices
        (`target_device.trace_for`). `stored` has the starting weights' dtypes in their file, which
        frozen ones keep with LoRA."""
        self._config, self._mesh = config, mesh
        self._layout = Layout.of(config.train.sharding, mesh)
        self._abstract = AbstractState(config, 1, mesh)
        self._weights = as_stored(self._abstract, stored or {})
        self._kept: dict[Remat, Activations] = {}
        self._gradients: dict[bool, AbstractArrays] = {}

    def of(self, config: RunConfig) -> Memory:
        """Return the memory of a run that differs at most in `remat`, `microbatch_size` and
        `gradient_accumulation_steps`."""
        train = config.train
        gradients = bytes_per_device(self._gradients_of(config).values())
        one_layer, activations = self._activation_bytes(config)
        return Memory(
            weights=bytes_per_device(self._weights.values()),
            moments=bytes_per_device(self._abstract.optimizer.values()),
            gradients=gradients,
            accumulator=gradients if train.microbatches_per_step > 1 else 0,
            gathered=self._gathered_bytes(config),
            activations=activations,
            temporary=max(self._logits_bytes(config) - gradients, one_layer),
            batch=2 * self._tokens(config) * train.microbatches_per_step * INT32_BYTES,
            teacher=self._teacher_bytes(config),
            error=_error(config.model),
        )

    def _activation_bytes(self, config: RunConfig) -> tuple[int, int]:
        """Return the bytes of the values in one period of layers, which are compiled together, and
        of the residuals of all layers. XLA's CPU compiler widens 16-bit residuals of a loop to
        float32, and undoes rematerialization of unrolled layers, whose values are all residuals;
        on accelerators fusions leave about half of a layer's values in memory."""
        model, loop = config.model, layer_loop(config.train, config.model)
        scale = config.train.microbatch_size / self._config.train.microbatch_size
        if model.n_layers:  # dense layers are outside of the loop
            scale *= model.n_layers / (model.n_layers - model.n_dense_layers)
        if not model.n_layers:
            return 0, int(scale * self._activations(loop.remat).total)
        is_cpu = target_device.platform() == "cpu"
        is_unrolled = loop.unroll >= periods(model)
        remat: Remat = "none" if is_cpu and is_unrolled else loop.remat
        widened = FLOAT32_BYTES / dtype_of(config.train).itemsize if is_cpu else 1
        residuals = scale * self._activations(remat).in_layers * (1 if is_unrolled else widened)
        if remat == "none" and is_unrolled:
            return 0, int(residuals)
        share = len(model.repeated_kinds) / model.n_layers * (1 if is_cpu else 0.5)
        return int(scale * share * self._activations("none").in_layers), int(residuals)

    def _activations(self, remat: Remat) -> Activations:
        """Return the residuals of a microbatch of the size of the first config."""
        if remat not in self._kept:
            model, train = self._config
            config = RunConfig(model, train.model_copy(update={"remat": remat}))
            state = self._abstract.fill(self._weights, self._abstract.optimizer)  # type: ignore[arg-type]
            self._kept[remat] = activations_of(config, self._mesh, *state)
        return self._kept[remat]

    def _logits_bytes(self, config: RunConfig) -> int:
        """Return the bytes of a chunk of logits, of their gradient and of the head's."""
        layout = self._layout
        rows = layout.padded_vocab_size(config.model.vocab_size) // size_along(self._mesh, TENSOR)
        logits = chunk_tokens(self._tokens(config), rows) * rows
        each = jnp.dtype(config.train.logits_dtype).itemsize + dtype_of(config.train).itemsize
        return logits * each + rows * config.model.emb_dim * FLOAT32_BYTES

    def _tokens(self, config: RunConfig) -> int:
        """Return the tokens of a microbatch on each device."""
        rows = config.train.microbatch_size // self._mesh.shape[DATA]
        return rows * config.sequence_length // size_along(self._mesh, CONTEXT)

    def _gathered_bytes(self, config: RunConfig) -> int:
        """Return the bytes of full copies of sharded weights: those outside the layers, except
        tables that are only looked up, and those of one period of layers."""
        model, itemsize = config.model, dtype_of(config.train).itemsize
        heads = (HEAD, TOKEN_EMBEDDING) if model.tied_embeddings else (HEAD,)
        total = 0.0
        for name, array in self._weights.items():
            elements = _gathered_elements(array)
            if name.startswith(BLOCKS):
                total += elements * itemsize * len(model.repeated_kinds) / model.n_layers
                if config.train.uses_float8 and name.endswith(".kernel"):
                    total += bytes_per_device([array]) / 4
            elif name.startswith(heads):
                total += elements * itemsize
            elif not name.startswith(LOOKED_UP):
                total += elements * FLOAT32_BYTES
        return int(total)

    def _teacher_bytes(self, config: RunConfig) -> int:
        """Return the bytes of the teacher and its predictions; see `flops.model_beside`."""
        train = config.train
        if train.teacher is None:
            return 0
        values, weights = (train.teacher_top_k or 0) * 8 + 4, 0
        if teacher := model_beside(train):
            values = config.model.vocab_size * 4
            weights = bytes_per_device(AbstractModel(teacher, self._layout).weights.values())
        return weights + config.most_tokens_per_step * values // size_along(self._mesh, *TOKEN_AXES)

    def _gradients_of(self, config: RunConfig) -> AbstractArrays:
        """Return a microbatch's gradients. Those of a single microbatch are reduced as soon as they
        are computed, and then in the layout for updates."""
        is_single = config.train.microbatches_per_step == 1
        if is_single not in self._gradients:
            layout = self._layout.for_updates if is_single else self._layout
            weights = self._abstract.weights_in(layout)
            self._gradients[is_single] = {name: weights[name] for name in self._abstract.trained}
        return self._gradients[is_single]


def _error(model: ModelConfig) -> float:
    platform = target_device.platform()
    is_long = platform == "tpu" and len(model.repeated_kinds) > 2
    return LONG_PATTERN_ERROR if is_long else ERRORS[platform]


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
    return bytes_per_device(jax.tree.leaves(states))


def bytes_per_device(arrays: Iterable[Any]) -> int:
    """Return the bytes of each device's shards of arrays."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in arrays
        if array.sharding is not None
    )


def _gathered_elements(array: jax.ShapeDtypeStruct) -> int:
    """Return the elements of a parameter gathered along the axis that FSDP shards; 0 if none is."""
    assert isinstance(array.sharding, NamedSharding)
    if (axis := sharded_axis(array.sharding.spec)) is None:
        return 0
    shard = math.prod(array.sharding.shard_shape(array.shape))
    return shard * size_along(array.sharding.mesh, *axis.mesh_axes)


def activations_of(
    config: RunConfig, mesh: Mesh, model: GPT, optimizer: SkippingOptimizer
) -> Activations:
    """Return a microbatch's activations under the run's `remat`: the growth of residuals from two
    such numbers of sequences to three, as the rest is weights; a single sequence may have other
    residuals. Model and optimizer may be abstract."""
    rows = config.train.microbatch_size // mesh.shape[DATA]
    both = (_residuals(config, mesh, model, optimizer, count * rows) for count in (2, 3))
    in_layers = total = 0
    for one, two in zip(*both, strict=True):
        growth = (two.size - one.size) * one.dtype.itemsize
        in_layers += growth if one.shape[:1] == two.shape[:1] else 0  # the first axis is layers
        total += growth
    return Activations(in_layers, total)


def _residuals(
    config: RunConfig, mesh: Mesh, model: GPT, optimizer: SkippingOptimizer, rows: int
) -> list[jax.ShapeDtypeStruct]:
    """Return the residuals on a device of this many sequences."""
    train, layout = config.train, Layout.of(config.train.sharding, mesh)
    objective = objective_without_teacher(train)
    found: list[jax.ShapeDtypeStruct] = []

    def of_rows(model: GPT, gatherer: WeightGatherer, inputs_BS: Array, targets_BS: Array) -> Array:
        graph, *states = nnx.split(model, optimizer.wrt, ...)
        trainable, frozen = states
        starts_BS = inputs_BS if train.documents == "separate" else None
        arrays = inputs_BS, targets_BS, starts_BS
        microbatch = Microbatch(arrays, jnp.arange(rows), jax.random.key(0))

        def loss_of(trainable: nnx.State) -> Array:
            model = nnx.merge(graph, trainable, frozen, copy=True)
            return objective.loss(model, compute_of(train, model, gatherer), microbatch)[0]

        _, pullback = jax.vjp(loss_of, trainable)
        found.extend(jax.typeof(leaf) for leaf in jax.tree.leaves(pullback))
        return jnp.zeros(())

    batch = layout.batch_spec(2)
    shape = rows * mesh.shape[DATA], config.sequence_length
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    graph, state = nnx.split(model)

    def traced(state: nnx.State, *tokens: Array) -> Array:
        parts = layout, nnx.merge(graph, state), dtype_of(train)
        return on_mesh(*parts, of_rows, (batch, batch), PartitionSpec())(*tokens)

    jax.eval_shape(traced, state, tokens, tokens)
    return found
