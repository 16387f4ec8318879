"""The decoder blocks: one `Block` is attention and feed-forward; `run_blocks` scans over all of
them. Axes as in `gpt.py`."""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from rungs.config.base import AUTO
from rungs.config.model_config import LayerKind, ModelConfig
from rungs.config.optimization_config import AttentionKernelOrAuto, Remat
from rungs.model.attention import (
    AttentionContext,
    Cache,
    ValueEmbedding,
    sequence_contexts,
)
from rungs.model.delta_net import DeltaNet, DeltaState
from rungs.model.feed_forward import Routing, make_feed_forward
from rungs.model.latent_attention import make_attention
from rungs.model.layers import (
    NO_DROPOUT,
    Dropout,
    Norm,
    apply_norm,
    layers_with,
    make_norm,
    make_vector,
)
from rungs.model.remat import checkpoint_layer, save_activation
from rungs.parallel.fsdp import no_gather


class Compute(NamedTuple):
    """How a model is run. Results differ only by rounding."""

    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    """Dtype of activations and matmuls."""
    remat: Remat = "dots"
    """What the backward pass recomputes; see `remat.py`."""
    unroll: int = 1
    """Periods of the layer pattern per iteration of the scan."""
    gather: Callable[[nnx.State], nnx.State] = no_gather
    """All-gathers the weights of one layer; the backward pass gathers them again."""
    logits_dtype: DTypeLike = jnp.float32
    """Dtype of the head's logits in `GPT.summed_loss`."""
    attention_kernel: AttentionKernelOrAuto = AUTO
    """What computes attention over full sequences."""


class Passed(NamedTuple):
    """What a block made of its input."""

    x_BSD: Array
    """The residual stream after the block."""
    cache: Cache | DeltaState | None
    """The cache with these tokens added."""
    routing: Routing | None
    attention_input_BSD: Array
    attention_BSD: Array
    """Output of attention, or of the layer in its place, before a norm after it."""
    feed_forward_input_BSD: Array | None = None
    feed_forward_BSD: Array | None = None
    """Likewise of the feed-forward layer; None without one."""


class Block(nnx.Module):
    """Attention or, in layers of kind "delta_net", Gated DeltaNet, then feed-forward, each with its
    norms, dropout and residual connection. All blocks of a model are one module, with parameters
    stacked along a leading axis L; one that some layers lack has metadata `layers`, with those that
    have it."""

    def __init__(
        self, config: ModelConfig, key: Array, kind: LayerKind = "global", is_dense: bool = False
    ) -> None:
        attention_key, feed_forward_key = jax.random.split(key)
        is_delta = kind == "delta_net"
        placement = config.norm_placement_of(kind)
        self.residual, self.norm_placement = config.residual, placement
        width = {"emb": config.emb_dim}
        on_input = placement != "output"
        on_output = placement in ("around", "output")
        self.residual_scale = make_vector({}, 1.0) if config.residual_scalars else None
        self.embedding_skip = make_vector({}, 0.0) if config.residual_scalars else None
        self.attention_norm = nnx.data(make_norm(config, width) if on_input else None)
        self.attention = nnx.data(None if is_delta else make_attention(config, attention_key))
        self.delta_net = nnx.data(DeltaNet(config, attention_key) if is_delta else None)
        self.attention_output_norm = nnx.data(make_norm(config, width) if on_output else None)
        own = make_feed_forward(config, feed_forward_key, is_dense)
        self.feed_forward, self.dense_feed_forward = nnx.data(None), nnx.data(None)
        setattr(self, "dense_feed_forward" if is_dense else "feed_forward", nnx.data(own))
        has_feed_forward = own is not None
        self.feed_forward_norm = nnx.data(
            make_norm(config, width) if has_feed_forward and on_input else None
        )
        self.feed_forward_output_norm = nnx.data(
            make_norm(config, width) if has_feed_forward and on_output else None
        )

    def __call__(
        self,
        x_BSD: Array,
        context: AttentionContext,
        dropout: Dropout = NO_DROPOUT,
        cache: Cache | DeltaState | None = None,
    ) -> Passed:
        """Return what the block makes of x_BSD."""
        x_BSD = self._with_skip(x_BSD, context.embedding_BSD)
        attention_input = self._sublayer_input(x_BSD, self.attention_norm)
        mix: Any = self.delta_net if self.attention is None else self.attention
        attention, cache = mix(attention_input, context, dropout.fold(0), cache)
        y_BSD = dropout.fold(1).of_tokens(apply_norm(self.attention_output_norm, attention))
        x_BSD = self._add_sublayer(x_BSD, y_BSD, self.attention_norm)
        transform: Any = self.feed_forward or self.dense_feed_forward
        if transform is None:
            return Passed(x_BSD, cache, None, attention_input, attention)
        feed_forward_input = self._sublayer_input(x_BSD, self.feed_forward_norm)
        feed_forward, routing = transform(feed_forward_input)
        y_BSD = dropout.fold(2).of_tokens(apply_norm(self.feed_forward_output_norm, feed_forward))
        x_BSD = self._add_sublayer(x_BSD, y_BSD, self.feed_forward_norm)
        attended = attention_input, attention
        return Passed(x_BSD, cache, routing, *attended, feed_forward_input, feed_forward)

    def _with_skip(self, x_BSD: Array, embedding_BSD: Array | None) -> Array:
        """Return λ_r · x + λ_0 · x_0 if the block has these scalars, else x."""
        if self.residual_scale is None or self.embedding_skip is None or embedding_BSD is None:
            return x_BSD
        scaled = self.residual_scale[...] * x_BSD.astype(jnp.float32)
        return (scaled + self.embedding_skip[...] * embedding_BSD).astype(x_BSD.dtype)

    def _sublayer_input(self, x_BSD: Array, norm: Norm | None) -> Array:
        if norm is None or self.norm_placement == "after":
            return x_BSD
        return save_activation(apply_norm(norm, x_BSD))

    def _add_sublayer(self, x_BSD: Array, y_BSD: Array, norm: Norm | None) -> Array:
        """Return the residual stream after a sublayer with output y."""
        y_BSD = save_activation(x_BSD + y_BSD) if self.residual else y_BSD
        return apply_norm(norm, y_BSD) if self.norm_placement == "after" else y_BSD


Observe = Callable[[Block, AttentionContext, Passed], Any]
"""Returns what to keep of a layer: a tree of arrays, or None."""


def keep_nothing(*_: Any) -> None:
    """Keep nothing of a layer."""


def keep_output(_: Block, __: AttentionContext, passed: Passed) -> Array:
    """Keep the residual stream after a layer."""
    return passed.x_BSD


PARTS = (
    *("attention", "delta_net", "attention_norm", "attention_output_norm"),
    *("feed_forward", "dense_feed_forward", "feed_forward_norm", "feed_forward_output_norm"),
)
"""Modules of a block that only some layers of a model may have."""


def make_blocks(config: ModelConfig, key: Array) -> Block:
    """Return all blocks as one module."""
    keys = jax.random.split(key, config.n_layers)
    layers = defaultdict[tuple[bool, bool], list[int]](list)
    for layer, kind in enumerate(config.layer_kinds()):
        layers[kind == "delta_net", layer < config.n_dense_layers].append(layer)
    made = []
    for (is_delta, is_dense), own in layers.items():
        make = functools.partial(
            Block, config, kind="delta_net" if is_delta else "global", is_dense=is_dense
        )
        made.append((own, nnx.vmap(make)(keys[np.array(own)])))
    return made[0][1] if len(made) == 1 else _joined(made)


def _joined(parts: list[tuple[list[int], Block]]) -> Block:
    """Return one module of different blocks, each with the numbers of its layers."""
    versions = defaultdict[Any, list[tuple[list[int], nnx.Variable]]](list)
    for layers, blocks in parts:
        for path, param in nnx.to_flat_state(nnx.state(blocks)):
            versions[path].append((layers, param))
    n_layers = sum(len(layers) for layers, _ in parts)
    joined = parts[0][1]
    for name in PARTS:
        own = (getattr(blocks, name) for _, blocks in parts)
        setattr(joined, name, next((part for part in own if part is not None), None))
    params = [(path, _stacked(each, n_layers)) for path, each in versions.items()]
    nnx.update(joined, nnx.from_flat_state(params))
    return joined


def _stacked(versions: list[tuple[list[int], nnx.Variable]], n_layers: int) -> nnx.Variable:
    """Return a parameter with its layers in order."""
    layers = [layer for own, _ in versions for layer in own]
    order = np.argsort(layers)
    param = versions[0][1].copy()
    param.set_value(jnp.concatenate([each.get_value() for _, each in versions])[order])
    if len(layers) < n_layers:
        param.set_metadata(layers=tuple(sorted(layers)))
    return param


def block_graphs(config: ModelConfig, blocks: Block) -> list[nnx.GraphDef[Block]]:
    """Return the structure of each layer's block, for `nnx.merge` with its parameters."""
    kinds = [(kind, n < config.n_dense_layers) for n, kind in enumerate(config.layer_kinds())]
    graphs = {kind: _block_graph(blocks, kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    return [graphs[kind] for kind in kinds]


def _block_graph(blocks: Any, layer: int) -> nnx.GraphDef[Block]:
    own = nnx.merge(*nnx.split(blocks))
    for name in PARTS:
        params = jax.tree.leaves(nnx.state(getattr(own, name, None)), is_leaf=_is_param)
        if params and layer not in layers_with(params[0], layer + 1):
            setattr(own, name, None)
    return nnx.graphdef(own)


def _is_param(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def layer_state(stacked: nnx.State, layer: int) -> nnx.State:
    """Return the parameters of a layer from stacked ones, or from those of one period of the layer
    pattern, whose layers are counted from 0."""
    own = []
    for path, param in nnx.to_flat_state(stacked):
        layers = layers_with(param, layer + 1)
        if layer in layers:
            own.append((path, _with_each(param, operator.itemgetter(layers.index(layer)))))
    return nnx.from_flat_state(own)


def _with_each(param: nnx.Variable, function: Callable[[Array], Array]) -> nnx.Variable:
    """Return a parameter with a function applied to its array, or to both of `fsdp.Kept`."""
    return param.replace(jax.tree.map(function, param.get_value()))


def run_blocks(
    blocks: Block | None,
    config: ModelConfig,
    x_BSD: Array,
    dropout: Dropout,
    compute: Compute,
    observe: Observe = keep_nothing,
    starts_BS: Array | None = None,
    values: ValueEmbedding | None = None,
) -> tuple[Array, Any, Routing | None]:
    """Apply the blocks in order, scanning over periods of the layer pattern. Each layer of a period
    is compiled once; layers after the last full period follow the scan.

    Args:
        observe: says what to keep of each layer.
        starts_BS: as for `GPT.forward`.
        values: stacked value embeddings of all layers that have one.

    Returns:
        x_BSD; what `observe` keeps, stacked over layers; the routing of all layers."""
    if blocks is None:
        return x_BSD, None, None
    contexts = sequence_contexts(config, x_BSD.shape[-2], starts_BS, compute.attention_kernel)
    contexts = with_embedding(config, contexts, x_BSD)
    dense, kinds = config.n_dense_layers, config.repeated_kinds
    kinds = tuple(kinds[(dense + place) % len(kinds)] for place in range(len(kinds)))
    length, value_places = len(kinds), [n for n in config.value_layers if n < len(kinds)]
    graphs, stacked = block_graphs(config, blocks), nnx.state(blocks)
    layers = _Layers(graphs, contexts, value_places, dropout, compute, observe)
    carry: _Carry = x_BSD, jnp.asarray(1)
    kept_of_dense: Any = None
    if dense:
        first_kinds = list(config.layer_kinds())[:dense]
        carry, (kept_of_dense, _) = layers.run(0, first_kinds, carry, (stacked, values))
        stacked = _after(dense, stacked)
    periods, remainder = divmod(config.n_layers - dense, length)
    change_all = functools.partial(_map_layers, (stacked, values), length, len(value_places))
    by_period = change_all(functools.partial(_by_period, periods))
    run_period = functools.partial(layers.run, dense, kinds)
    carry, outputs = jax.lax.scan(run_period, carry, by_period, unroll=compute.unroll)
    kept, routing = jax.tree.map(lambda a: a.reshape(periods * length, *a.shape[2:]), outputs)
    if remainder:
        left = change_all(lambda own, array: array[periods * own :])
        carry, last = layers.run(dense, kinds[:remainder], carry, left)
        kept, routing = jax.tree.map(lambda *a: jnp.concatenate(a), (kept, routing), last)
    if dense:
        kept = jax.tree.map(lambda *a: jnp.concatenate(a), kept_of_dense, kept)
    return carry[0], kept, routing


_Carry = tuple[Array, Array]
"""The residual stream, and the number of the next layer, from 1."""
_Stacked = tuple[nnx.State, ValueEmbedding | None]
"""Parameters of layers, and value embeddings of those that have one."""


class _Layers(NamedTuple):
    """What all layers of a model share."""

    graphs: list[nnx.GraphDef[Block]]
    contexts: dict[LayerKind, AttentionContext]
    value_places: list[int]
    """Places in a period of the layers with a value embedding."""
    dropout: Dropout
    compute: Compute
    observe: Observe

    def run(
        self, first: int, kinds: Sequence[LayerKind], carry: _Carry, period: _Stacked
    ) -> tuple[_Carry, tuple[Any, Routing | None]]:
        """Run layers of these kinds, whose graphs are those from `first` on; return what is kept of
        them and their routing, stacked."""
        (x_BSD, number), (params, values) = carry, period
        outputs = []
        for place, kind in enumerate(kinds):
            layer = functools.partial(self._run_one, first + place, place)
            run = checkpoint_layer(layer, self.compute.remat, self.compute.gather is not no_gather)
            context = self.contexts[kind]
            if place in self.value_places:
                context = with_values(context, values, self.value_places.index(place))
            x_BSD, output = run(params, x_BSD, context, self.dropout.fold(number + place))
            outputs.append(output)
        return (x_BSD, number + len(outputs)), jax.tree.map(lambda *a: jnp.stack(a), *outputs)

    def _run_one(
        self, layer: int, place: int, params: nnx.State, *given: Any
    ) -> tuple[Array, tuple[Any, Routing | None]]:
        """Run a layer; `given` are the arguments of its block."""
        block = nnx.merge(self.graphs[layer], self.compute.gather(layer_state(params, place)))
        passed = block(*given)
        return passed.x_BSD, (self.observe(block, given[1], passed), passed.routing)


def with_embedding(
    config: ModelConfig, contexts: dict[LayerKind, AttentionContext], x_BSD: Array
) -> dict[LayerKind, AttentionContext]:
    """Return the contexts with the first block's input, if the model has residual scalars."""
    if not config.residual_scalars:
        return contexts
    return {kind: context._replace(embedding_BSD=x_BSD) for kind, context in contexts.items()}


def with_values(
    context: AttentionContext, values: ValueEmbedding | None, index: int
) -> AttentionContext:
    """Return the context with one of several layers' value embeddings."""
    return context._replace(value_embedding=jax.tree.map(lambda array: array[index], values))


def layer_contexts(
    config: ModelConfig,
    contexts: dict[LayerKind, AttentionContext],
    x_BSD: Array,
    values: ValueEmbedding | None,
) -> Iterator[AttentionContext]:
    """Yield each layer's context, for layers that run one by one; arguments as for `run_blocks`."""
    contexts = with_embedding(config, contexts, x_BSD)
    for layer, kind in enumerate(config.layer_kinds()):
        has_values, context = layer in config.value_layers, contexts[kind]
        yield (
            with_values(context, values, config.value_layers.index(layer))
            if has_values
            else context
        )


def _after(count: int, stacked: nnx.State) -> nnx.State:
    """Return the parameters of the layers after the first ones, which are then counted from 0."""
    own = []
    for path, param in nnx.to_flat_state(stacked):
        rows = len(jax.tree.leaves(param.get_value())[0])
        before = sum(layer < count for layer in layers_with(param, count))
        if before < rows:
            left = _with_each(param, operator.itemgetter(slice(before, None)))
            if "layers" in param.get_metadata():
                layers = layers_with(param, count)[before:]
                left.set_metadata(layers=tuple(layer - count for layer in layers))
            own.append((path, left))
    return nnx.from_flat_state(own)


def _map_layers(
    layers: _Stacked, period: int, n_values: int, function: Callable[[int, Array], Array]
) -> _Stacked:
    """Return the layers with a function applied to each array and the number of its layers in the
    first period of the layer pattern."""

    def of(param: nnx.Variable) -> nnx.Variable:
        own = sum(layer < period for layer in layers_with(param, period))
        return _with_each(param, functools.partial(function, own))

    params, values = layers
    mapped: nnx.State = jax.tree.map(of, params, is_leaf=_is_param)
    return mapped, jax.tree.map(functools.partial(function, n_values), values)


def _by_period(periods: int, length: int, array: Array) -> Array:
    """Return an array stacked over layers, reshaped to a leading axis of periods and one of their
    `length` layers, without the remainder."""
    return array[: periods * length].reshape(periods, length, *array.shape[1:])
