"""Where the memory of a training step goes on each device, counted without computing anything; and
how it would go for a step that computes the same in less. Axes as in `model.py`.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.config.run_config import RunConfig
from rungs.config.train_config import Remat
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import chunk_tokens
from rungs.model.remat import RECOMPUTED
from rungs.optim.multi_steps import MultiSteps
from rungs.optim.precision import dtype_of
from rungs.parallel import target_device
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.names import BLOCKS, DATA, HEAD, TENSOR
from rungs.parallel.sharding import Layout
from rungs.step.state import AbstractArrays, AbstractState
from rungs.step.train_step import objective

_MOST_ELEMENTWISE = 2.5
"""Times what a layer's products give: as much is there at once of what is computed between them."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device while a step runs."""

    weights: int
    moments: int
    """The optimizer's state."""
    gradients: int
    """Those of a microbatch."""
    accumulator: int
    """The sum of all microbatches' gradients, where there are several."""
    gathered: int
    """Weights of which each device has a part, made whole: a layer's, and those outside of the
    layers."""
    activations: int
    """What the forward pass of a microbatch keeps for the backward pass."""
    logits: int
    """Those of a chunk of a microbatch, in whose place come their exponentials, and their
    gradient; with the gradients of the head and of what it sees."""
    layer: int
    """What the backward pass of a layer has at once: what it computes again, and gradients, also
    those of embedding and head once more. The logits have gone when it comes."""
    batch: int
    """Token ids of a step."""

    @property
    def total(self) -> int:
        together = dataclasses.asdict(self)
        after_one_another = together.pop("logits"), together.pop("layer")
        return sum(together.values()) + max(after_one_another)

    def with_rows(self, config: RunConfig, before: int, mesh: Mesh) -> "Memory":
        """Of a config with another microbatch_size, where this is of one of `before`."""
        rows = config.train.microbatch_size
        constant = _copied(config, mesh)
        return dataclasses.replace(
            self,
            accumulator=self.gradients if config.train.gradient_accumulation_steps > 1 else 0,
            activations=self.activations * rows // before,
            logits=_logits(config, mesh),
            layer=(self.layer - constant) * rows // before + constant,
        )


def memory_of(config: RunConfig, mesh: Mesh) -> Memory:
    """The memory of a run's step.

    Weights, moments and gradients are exact. Activations are what the derivative of the loss keeps.
    What comes between is the compiler's choice: `layer` is a rule that its own analysis bears out,
    as `test_memory.py` has it.

    Args:
        mesh: in the mode of `config.train.sharding`; of devices there are or, for those of
            `target_device.trace_for`, without.
    """
    abstract = AbstractState(config, 1, mesh)
    trained = _bytes_per_device({name: abstract.weights[name] for name in abstract.trained})
    kept = {remat: _kept_for_backward(config, mesh, abstract, remat) for remat in RECOMPUTED}
    return Memory(
        weights=_bytes_per_device(abstract.weights),
        moments=_bytes_per_device(abstract.optimizer),
        gradients=trained,
        accumulator=trained if config.train.gradient_accumulation_steps > 1 else 0,
        gathered=_gathered(config, abstract.weights),
        activations=kept[config.train.remat].as_read,
        logits=_logits(config, mesh),
        layer=_of_layer(config, mesh, {remat: one.stacked for remat, one in kept.items()}),
        batch=_batch(config, mesh),
    )


def at_rest(model: GPT, optimizer: MultiSteps) -> int:
    """Bytes on each device of a model, its optimizer's state, a gradient and the sum of those."""
    trained = nnx.state(model, optimizer.wrt)
    states = nnx.state(model), nnx.state(optimizer), trained, trained
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(states)
    )


def shown(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _batch(config: RunConfig, mesh: Mesh) -> int:
    """Bytes of a device's part of a step's inputs and targets."""
    sequences = config.train.sequences_per_step // mesh.shape[DATA]
    tokens = sequences * config.sequence_length
    return 2 * tokens * jnp.int32.dtype.itemsize


def _logits(config: RunConfig, mesh: Mesh) -> int:
    """Bytes of the logits that are there at once, with what is made of them."""
    width, float32_bytes = config.model.emb_dim, jnp.float32.dtype.itemsize
    vocabulary, tokens = _vocabulary(config, mesh), _tokens(config, mesh)
    chunk = chunk_tokens(tokens, vocabulary) * vocabulary
    each = float32_bytes + dtype_of(config.train).itemsize
    return chunk * each + (vocabulary + tokens) * width * float32_bytes


def _of_layer(config: RunConfig, mesh: Mesh, kept: dict[Remat, int]) -> int:
    """Bytes of a layer's backward pass; of all layers of a period, as they are compiled together.

    What was kept of the layer is taken out of the stack of all layers, and as much twice again is
    the gradients; or instead of those it is what is computed again.

    Args:
        kept: of all layers for their backward pass, by policy.
    """
    layers, remat = config.model.n_layers, config.train.remat
    if not layers:
        return 0
    period = len(config.model.repeated_kinds)
    none, products, own = (kept[policy] // layers for policy in ("none", "dots", remat))
    in_float32 = products * jnp.float32.dtype.itemsize // dtype_of(config.train).itemsize
    # of what is elementwise much is fused, and never there as a whole
    elementwise = min(none - products, int(_MOST_ELEMENTWISE * in_float32))
    recomputed = RECOMPUTED[remat]
    again = elementwise * recomputed.elementwise + max(products - own, 0) * recomputed.matmuls
    taken_out = products if layers > period else 0
    at_once = max(period * (2 * products + taken_out), period * again + taken_out)
    return at_once + period * _of_experts(config, mesh) + _copied(config, mesh)


def _of_experts(config: RunConfig, mesh: Mesh) -> int:
    """On a CPU, where XLA's ragged product is a product with every expert: the rows that go through
    experts, once for each expert, with zeros in place of those of others."""
    model = config.model
    if model.n_experts is None or target_device.platform() != "cpu":
        return 0
    rows = _tokens(config, mesh) * (model.experts_per_token or 0) * model.n_experts
    inner, outer = model.hidden_dim // mesh.shape[TENSOR], model.emb_dim
    if RECOMPUTED[config.train.remat].matmuls:
        copies = 4 * outer + 4 * inner
    else:
        copies = 2 * outer + 3 * inner
    return rows * copies * jnp.float32.dtype.itemsize


def _gathered(config: RunConfig, weights: AbstractArrays) -> int:
    """Bytes of the weights that are whole at once, of which this device keeps a part."""
    narrow, total = dtype_of(config.train).itemsize, 0
    of_period = len(config.model.repeated_kinds) / max(config.model.n_layers, 1)
    for name, array in weights.items():
        assert isinstance(array.sharding, NamedSharding)
        if DATA in array.sharding.spec:
            own = math.prod(array.sharding.shard_shape(array.shape))
            whole = own * array.sharding.mesh.shape[DATA]
            if name.startswith(BLOCKS):
                total += int(whole * of_period) * narrow
            else:
                total += whole * (narrow if name.startswith(HEAD) else array.dtype.itemsize)
    return total


def _copied(config: RunConfig, mesh: Mesh) -> int:
    """Bytes of the gradients of embedding and head in another order of their axes, as the loop over
    layers is between the two; one of them, where they are handed out anyway."""
    if not config.model.n_layers:
        return 0
    sharding = config.train.sharding
    copies = 1 if sharding and "fsdp" in sharding.mode else 2
    row_bytes = config.model.emb_dim * jnp.float32.dtype.itemsize
    return copies * _vocabulary(config, mesh) * row_bytes


def _vocabulary(config: RunConfig, mesh: Mesh) -> int:
    """Rows of it on each device."""
    rows: int = Layout(mesh).padded_vocab_size(config.model.vocab_size) // mesh.shape[TENSOR]
    return rows


def _tokens(config: RunConfig, mesh: Mesh) -> int:
    """Of a microbatch, on each device."""
    rows = config.train.microbatch_size // mesh.shape[DATA]
    return rows * config.sequence_length


class _Kept(NamedTuple):
    """Bytes of what a microbatch's forward pass keeps."""

    stacked: int
    """Of the loop over layers."""
    as_read: int
    """On a CPU in float32: XLA's compiler there widens what a loop over layers has kept in 16 bits,
    all of it, before the backward pass begins."""


def _kept_for_backward(
    config: RunConfig, mesh: Mesh, abstract: AbstractState, remat: Remat
) -> _Kept:
    """A microbatch's activations under a policy.

    What is kept for twice as many sequences is compared: what has grown is theirs, the rest are
    weights.
    """
    config = RunConfig(config.model, config.train.model_copy(update={"remat": remat}))
    rows = config.train.microbatch_size // mesh.shape[DATA]
    both = (_residuals(config, mesh, abstract, count * rows) for count in (1, 2))
    stacked = as_read = 0
    for one, two in zip(*both, strict=True):
        grown = _bytes(two) - _bytes(one)
        stacked += grown if one.shape[:1] == two.shape[:1] else 0  # the first axis is the layers'
        is_widened = config.model.n_layers and one.dtype.itemsize == 2
        as_read += grown * (2 if is_widened and target_device.platform() == "cpu" else 1)
    return _Kept(stacked, as_read)


def _residuals(
    config: RunConfig, mesh: Mesh, abstract: AbstractState, rows: int
) -> list[jax.ShapeDtypeStruct]:
    """What a device keeps of the forward pass of so many sequences for the backward pass."""
    train, layout = config.train, Layout.of(config.train.sharding, mesh)
    model, optimizer = abstract.fill(abstract.weights, abstract.optimizer)  # type: ignore[arg-type]
    graph, *states = nnx.split(model, optimizer.wrt, ...)
    gatherer = WeightGatherer(layout, model, dtype_of(train))
    found: list[jax.ShapeDtypeStruct] = []

    def on_each_device(
        trained: nnx.State, frozen: nnx.State, inputs_BS: Array, targets_BS: Array
    ) -> Array:
        def loss_of(trained: nnx.State) -> Array:
            model = nnx.merge(graph, trained, frozen, copy=True)
            batch = inputs_BS, targets_BS, jnp.arange(rows), jax.random.key(0)
            return objective(train, gatherer, model, *batch)[0]

        _, pull = jax.vjp(loss_of, trained)
        found.extend(jax.typeof(leaf) for leaf in jax.tree.leaves(pull))
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
