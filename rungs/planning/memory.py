"""Memory of a training step on each device, by component, computed without running anything.

Axis suffixes as in `rungs/model/gpt.py`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.config.run_config import RunConfig
from rungs.config.train_config import Remat
from rungs.model.gpt import GPT
from rungs.model.kernels import grouped_matmul
from rungs.model.kernels.cross_entropy import chunk_tokens
from rungs.model.remat import RECOMPUTED
from rungs.optim.multi_steps import MultiSteps
from rungs.optim.precision import dtype_of
from rungs.parallel import target_device
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.mesh import size_along
from rungs.parallel.names import BLOCKS, CONTEXT, DATA, HEAD, TENSOR, TOKEN_EMBEDDING
from rungs.parallel.sharding import Layout, sharded_axis
from rungs.step.state import AbstractArrays, AbstractState
from rungs.step.train_step import objective

Dtypes = Mapping[str, str]
"""NumPy's names of dtypes, by the names of parameters."""
_MAX_ELEMENTWISE = 2.5
"""Elementwise results that are in memory at the same time, as a multiple of a layer's matmul
results in float32."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device while a step runs."""

    weights: int
    moments: int
    """Optimizer state."""
    gradients: int
    """Of one microbatch."""
    accumulator: int
    """Sum of the gradients of all microbatches, if there are several."""
    gathered: int
    """Full copies of weights of which each device has a shard: those of one layer, and those
    outside the layers."""
    activations: int
    """What the forward pass of a microbatch keeps for the backward pass."""
    logits: int
    """Logits of one chunk of a microbatch, replaced in place by their exponentials, with their
    gradient and the gradients of the head and of its input."""
    layer: int
    """Backward pass of one layer: recomputed values, gradients, and a second copy of the gradients
    of embedding and head. It does not overlap with the logits."""
    batch: int
    """Token ids of a step."""

    @property
    def total(self) -> int:
        """Peak memory."""
        parts = dataclasses.asdict(self)
        logits, layer = parts.pop("logits"), parts.pop("layer")
        return sum(parts.values()) + max(logits, layer)

    def with_microbatch(self, config: RunConfig, before: int, mesh: Mesh) -> "Memory":
        """Return the memory of a config that differs only in microbatch_size.

        Args:
            config: with the new microbatch_size.
            before: the microbatch_size that this memory belongs to.
        """
        rows = config.train.microbatch_size
        constant = _gradient_copies(config, mesh)
        return dataclasses.replace(
            self,
            accumulator=self.gradients if config.train.gradient_accumulation_steps > 1 else 0,
            activations=self.activations * rows // before,
            logits=_logits(config, mesh),
            layer=(self.layer - constant) * rows // before + constant,
        )


MEMORY_LABELS = {
    "accumulator": "gradient sum",
    "gathered": "all-gathered",
    "layer": "backward",
    "batch": "token ids",
}
"""How tables call the fields of `Memory`, where that is not their own name."""


class _Kept(NamedTuple):
    """Bytes that a microbatch's forward pass keeps for the backward pass."""

    in_layers: int
    """In the loop over layers."""
    total: int
    """As the backward pass reads them: before it begins, XLA's CPU compiler widens all 16-bit
    activations of a loop over layers to float32."""


def memory_of(config: RunConfig, mesh: Mesh, stored: Dtypes | None = None) -> Memory:
    """Return the memory of a run's step.

    Weights, moments and gradients are exact. Activations are what the derivative of the loss
    keeps. Temporary arrays depend on the compiler: `layer` is a rule that agrees with the
    compiler's own analysis, as `test_memory.py` checks.

    Args:
        mesh: in the mode of `config.train.sharding`; abstract if the devices are only planned
            (`target_device.trace_for`).
        stored: dtypes of the file that the weights come from. With LoRA, frozen weights keep them.
    """
    return memory_by_remat(config, mesh, [config.train.remat], stored)[config.train.remat]


def memory_by_remat(
    config: RunConfig, mesh: Mesh, settings: Sequence[Remat], stored: Dtypes | None = None
) -> dict[Remat, Memory]:
    """Return the memory of a run's step with other settings of `remat`, as `memory_of`. Settings
    share their traces, which take most of the time."""
    abstract = AbstractState(config, 1, mesh)
    abstract.weights = as_stored(abstract, stored or {})
    traced: set[Remat] = {"none", "dots", *settings} if config.model.n_layers else set(settings)
    kept = {remat: _kept_for_backward(config, mesh, abstract, remat) for remat in traced}
    return {remat: _memory(_with_remat(config, remat), mesh, abstract, kept) for remat in settings}


def as_stored(abstract: AbstractState, stored: Dtypes) -> AbstractArrays:
    """Return the weights of a state, frozen ones in the dtypes that they are stored in."""
    return {
        name: array
        if name in abstract.trained or name not in stored
        else jax.ShapeDtypeStruct(array.shape, jnp.dtype(stored[name]), sharding=array.sharding)
        for name, array in abstract.weights.items()
    }


def _memory(
    config: RunConfig, mesh: Mesh, abstract: AbstractState, kept: dict[Remat, _Kept]
) -> Memory:
    trainable = _bytes_per_device({name: abstract.weights[name] for name in abstract.trained})
    return Memory(
        weights=_bytes_per_device(abstract.weights),
        moments=_bytes_per_device(abstract.optimizer),
        gradients=trainable,
        accumulator=trainable if config.train.gradient_accumulation_steps > 1 else 0,
        gathered=_gathered(config, abstract.weights),
        activations=kept[config.train.remat].total,
        logits=_logits(config, mesh),
        layer=_of_layer(config, mesh, {remat: one.in_layers for remat, one in kept.items()}),
        batch=_batch(config, mesh),
    )


def _with_remat(config: RunConfig, remat: Remat) -> RunConfig:
    return RunConfig(config.model, config.train.model_copy(update={"remat": remat}))


def state_bytes(model: GPT, optimizer: MultiSteps) -> int:
    """Return the bytes on each device of a model, its optimizer state, one gradient and the sum of
    gradients."""
    trainable = nnx.state(model, optimizer.wrt)
    states = nnx.state(model), nnx.state(optimizer), trainable, trainable
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(states)
    )


def format_bytes(size: float) -> str:
    """Return bytes in MB or GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _batch(config: RunConfig, mesh: Mesh) -> int:
    """Return the bytes of a device's shard of a step's inputs and targets."""
    tokens = _tokens(config, mesh) * config.train.gradient_accumulation_steps
    return 2 * tokens * jnp.int32.dtype.itemsize


def _logits(config: RunConfig, mesh: Mesh) -> int:
    """Return the bytes of one chunk's logits and of what is computed from them."""
    width, float32_bytes = config.model.emb_dim, jnp.float32.dtype.itemsize
    vocabulary, tokens = _vocabulary(config, mesh), _tokens(config, mesh)
    chunk = chunk_tokens(tokens, vocabulary) * vocabulary
    bytes_per_logit = float32_bytes + dtype_of(config.train).itemsize
    return chunk * bytes_per_logit + (vocabulary + tokens) * width * float32_bytes


def _of_layer(config: RunConfig, mesh: Mesh, kept: dict[Remat, int]) -> int:
    """Return the bytes of a layer's backward pass. The layers of one period of `layer_pattern` are
    compiled together, so they count together.

    The layer's activations are copied out of the stack of all layers. Gradients take as much twice
    again; or, if that is more, the recomputed values take their place.

    Args:
        kept: activations of all layers, by remat policy.
    """
    layers, remat = config.model.n_layers, config.train.remat
    if not layers:
        return 0
    period = len(config.model.repeated_kinds)
    everything, matmuls, own = (kept[policy] // layers for policy in ("none", "dots", remat))
    in_float32 = matmuls * jnp.float32.dtype.itemsize // dtype_of(config.train).itemsize
    # most elementwise operations are fused, so their results are never complete in memory
    elementwise = min(everything - matmuls, int(_MAX_ELEMENTWISE * in_float32))
    again = RECOMPUTED[remat]
    recomputed = elementwise * again.elementwise + max(matmuls - own, 0) * again.matmuls
    copied_out = matmuls if layers > period else 0
    peak = max(period * (2 * matmuls + copied_out), period * recomputed + copied_out)
    return peak + period * _of_experts(config, mesh) + _gradient_copies(config, mesh)


def _of_experts(config: RunConfig, mesh: Mesh) -> int:
    """Return the extra bytes of experts where XLA has no grouped matmul, as on a CPU, and uses one
    matmul for each expert: the rows of all experts, once for each expert, zeroed where they belong
    to another."""
    model = config.model
    if model.n_experts is None or not grouped_matmul.is_dense():
        return 0
    rows = _tokens(config, mesh) * (model.experts_per_token or 0) * model.n_experts
    inner, outer = model.hidden_dim // size_along(mesh, TENSOR), model.emb_dim
    if RECOMPUTED[config.train.remat].matmuls:
        copies = 4 * outer + 4 * inner
    else:
        copies = 2 * outer + 3 * inner
    return rows * copies * jnp.float32.dtype.itemsize


def _gathered(config: RunConfig, weights: AbstractArrays) -> int:
    """Return the bytes of all-gathered weights that are in memory at the same time."""
    narrow, total = dtype_of(config.train).itemsize, 0
    share_of_period = len(config.model.repeated_kinds) / max(config.model.n_layers, 1)
    for name, array in weights.items():
        assert isinstance(array.sharding, NamedSharding)
        if axis := sharded_axis(array.sharding.spec):
            shard = math.prod(array.sharding.shard_shape(array.shape))
            full = shard * size_along(array.sharding.mesh, *axis.mesh_axes)
            if name.startswith(BLOCKS):
                total += int(full * share_of_period) * narrow
            elif name.startswith(TOKEN_EMBEDDING):
                total += full * narrow if config.model.tied_embeddings else 0
            else:
                total += full * (narrow if name.startswith(HEAD) else array.dtype.itemsize)
    return total


def _gradient_copies(config: RunConfig, mesh: Mesh) -> int:
    """Return the bytes of transposed copies of the gradients of embedding and head, which the loop
    over layers separates. With FSDP there are none: each device has a part of the gradients."""
    sharding = config.train.sharding
    if not config.model.n_layers or (sharding and sharding.mode in ("fsdp", "fsdp_tp", "cp")):
        return 0
    row_bytes = config.model.emb_dim * jnp.float32.dtype.itemsize
    return 2 * _vocabulary(config, mesh) * row_bytes


def _vocabulary(config: RunConfig, mesh: Mesh) -> int:
    """Return the vocabulary rows on each device, padding included."""
    return Layout(mesh).padded_vocab_size(config.model.vocab_size) // size_along(mesh, TENSOR)


def _tokens(config: RunConfig, mesh: Mesh) -> int:
    """Return the tokens of a microbatch on each device."""
    rows = config.train.microbatch_size // mesh.shape[DATA]
    return rows * config.sequence_length // size_along(mesh, CONTEXT)


def _kept_for_backward(
    config: RunConfig, mesh: Mesh, abstract: AbstractState, remat: Remat
) -> _Kept:
    """Return a microbatch's activations under a remat policy.

    Compares one microbatch with one of twice as many sequences: what grows is activations, the
    rest is weights.
    """
    config = _with_remat(config, remat)
    rows = config.train.microbatch_size // mesh.shape[DATA]
    both = (_residuals(config, mesh, abstract, count * rows) for count in (1, 2))
    in_layers = total = 0
    for one, two in zip(*both, strict=True):
        growth = _bytes(two) - _bytes(one)
        in_layers += growth if one.shape[:1] == two.shape[:1] else 0  # the first axis is the layers
        is_widened = config.model.n_layers and one.dtype.itemsize == 2
        total += growth * (2 if is_widened and target_device.platform() == "cpu" else 1)
    return _Kept(in_layers, total)


def _residuals(
    config: RunConfig, mesh: Mesh, abstract: AbstractState, rows: int
) -> list[jax.ShapeDtypeStruct]:
    """Return what a device keeps for the backward pass of this many sequences."""
    train, layout = config.train, Layout.of(config.train.sharding, mesh)
    model, optimizer = abstract.fill(abstract.weights, abstract.optimizer)  # type: ignore[arg-type]
    graph, *states = nnx.split(model, optimizer.wrt, ...)
    gatherer = WeightGatherer(layout, model, dtype_of(train))
    found: list[jax.ShapeDtypeStruct] = []

    def on_each_device(
        trainable: nnx.State, frozen: nnx.State, inputs_BS: Array, targets_BS: Array
    ) -> Array:
        def loss_of(trainable: nnx.State) -> Array:
            model = nnx.merge(graph, trainable, frozen, copy=True)
            batch = inputs_BS, targets_BS, jnp.arange(rows), jax.random.key(0)
            return objective(train, gatherer, model, *batch)[0]

        _, pullback = jax.vjp(loss_of, trainable)
        found.extend(jax.typeof(leaf) for leaf in jax.tree.leaves(pullback))
        return jnp.zeros(())

    batch = layout.batch_spec(2)
    shape = rows * mesh.shape[DATA], config.sequence_length
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    jax.eval_shape(
        jax.shard_map(
            on_each_device,
            mesh=mesh,
            in_specs=(*map(layout.specs, states), batch, batch),
            out_specs=PartitionSpec(),
        ),
        *states,
        tokens,
        tokens,
    )
    return found


def _bytes_per_device(arrays: AbstractArrays) -> int:
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in arrays.values()
        if array.sharding is not None
    )


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize
