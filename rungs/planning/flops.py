"""What a run takes, from its configs alone: parameters, arithmetic, bytes of a checkpoint.

Axes as in `model.py`.
"""

import math
from typing import NamedTuple

import jax

from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import ShardingConfig
from rungs.model.kernels import cudnn_attention
from rungs.model.kernels.blockwise_attention import blocks
from rungs.model.lora import DOWN, LOW_RANK_NAMES
from rungs.model.remat import RECOMPUTED
from rungs.optim.precision import dtype_of
from rungs.parallel import target_device
from rungs.planning.communication import layout_without_devices
from rungs.step.state import AbstractState, Shapes, shapes_of

TOKENS_PER_PARAMETER = 20
"""Of training, at which a model of a given budget is best (Hoffmann et al. 2022, table 3)."""


class Parameters(NamedTuple):
    """How many parameters a model has, by what they are for."""

    embedding: int
    """Of tokens and of learned positions; the head, too, where it is tied to them."""
    attention: int
    feed_forward: int
    """With the router of a mixture of experts."""
    norms: int
    head: int
    low_rank: int
    """What low-rank adaptation adds."""

    @property
    def total(self) -> int:
        return sum(self)


class Passes(NamedTuple):
    """FLOPs for each token of training."""

    forward: float
    again: float
    """What the backward pass computes again of the forward pass."""
    backward: float

    @property
    def total(self) -> float:
        return sum(self)


class Flops(NamedTuple):
    """FLOPs for each token of training, over all devices, as a step computes them: 2 for each
    element of a product."""

    layers: Passes
    """Products with the layers' weights."""
    attention: Passes
    """Queries with keys, and what they weigh with values."""
    head: Passes
    """Products with the head's weights."""

    @property
    def total(self) -> float:
        return sum(part.total for part in self)


def parameters(shapes: Shapes) -> Parameters:
    """All parameters of a model.

    Args:
        shapes: as `state.shapes_of`.
    """
    return _by_group({name: math.prod(shape) for name, shape in shapes.items()})


def active_parameters(shapes: Shapes, model: ModelConfig) -> Parameters:
    """Those that a token meets: of each layer's experts those that it goes through."""
    return _by_group(_active_sizes(shapes, model))


def conventional_flops(shapes: Shapes, model: ModelConfig, length: int) -> float:
    """FLOPs for each token of training by the usual formula, in which utilisation is told: 6 for
    each active weight in a product (Kaplan et al. 2020, section 2.1), and 12 · L · N · H · S for
    attention, all of the square S · S of it (Chowdhery et al. 2022, appendix B).

    Args:
        length: S, tokens in a sequence.
    """
    sizes = _active_sizes(shapes, model)
    in_products = sum(sizes.values()) - sizes.get("position_embedding.embedding", 0)
    if not model.tied_embeddings:
        in_products -= sizes["token_embedding.embedding"]
    return 6 * in_products + 12 * model.n_layers * _heads_width(model) * length


def flops(config: RunConfig, vocabulary: int | None = None) -> Flops:
    """FLOPs of a step for each of its tokens; what is not a product is little beside them.

    Args:
        vocabulary: rows that it has in memory, where those are more than `vocab_size`.
    """
    model = config.model
    return Flops(
        layers=_of_layers(config) if model.n_layers else Passes(0, 0, 0),
        attention=_of_attention(config) if model.n_layers else Passes(0, 0, 0),
        head=_of_head(config, vocabulary or model.vocab_size),
    )


def checkpoint_bytes(config: RunConfig) -> int:
    """Of a checkpoint's arrays, weights and optimizer state; the rest of it is small."""
    train = config.train.model_copy(update={"sharding": None})
    with target_device.trace_for(target_device.Target("cpu")):  # no vocabulary padding
        mesh = layout_without_devices(ShardingConfig(data=1)).mesh
        state = AbstractState(RunConfig(config.model, train), 1, mesh)
    arrays = (*state.weights.values(), *state.optimizer.values())
    return sum(array.size * array.dtype.itemsize for array in arrays)


def _by_group(sizes: dict[str, int]) -> Parameters:
    found = dict.fromkeys(Parameters._fields, 0)
    for name, size in sizes.items():
        found[_group(name)] += size
    return Parameters(**found)


def _group(name: str) -> str:
    """The field of `Parameters` that a parameter counts in."""
    if name.endswith(LOW_RANK_NAMES):
        return "low_rank"
    if "norm" in name:
        return "norms"
    place = name.removeprefix("blocks.").split(".")[0]
    return "embedding" if place.endswith("_embedding") else place


def _active_sizes(shapes: Shapes, model: ModelConfig) -> dict[str, int]:
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    for name in filter(_is_of_experts, sizes if model.n_experts else ()):
        sizes[name] = sizes[name] * (model.experts_per_token or 0) // (model.n_experts or 1)
    return sizes


def _is_of_experts(name: str) -> bool:
    """Whether a parameter of a mixture of experts is one that each expert has its own of."""
    return name.startswith("blocks.feed_forward.") and ".router." not in name


def _of_layers(config: RunConfig) -> Passes:
    model, train = config
    all_sizes = {name: math.prod(s) for name, s in shapes_of(model, train.lora).items()}
    low_rank = {name: size for name, size in all_sizes.items() if name.endswith(LOW_RANK_NAMES)}
    sizes = {
        name: size
        for name, size in all_sizes.items()
        if name.startswith("blocks.") and name.endswith(".kernel")
    }
    if model.n_experts:
        for name in filter(_is_of_experts, sizes):
            sizes[name] = round(sizes[name] * _experts_met(model))
    weights = sum(sizes.values())
    forward = 2 * (weights + sum(low_rank.values()))
    again = 0.0
    recomputed = RECOMPUTED[train.remat]
    if recomputed.matmuls:
        again = forward - 2 * _not_needed_again(sizes, model)
    elif recomputed.elementwise:
        again = 2 * sum(size for name, size in low_rank.items() if name.endswith(DOWN))
    by_weights = 0 if train.lora else 2 * weights
    return Passes(forward, again, 2 * weights + by_weights + 4 * sum(low_rank.values()))


def _experts_met(model: ModelConfig) -> float:
    """With what share of all experts' weights a token is multiplied: with those of the experts it
    goes through; on a CPU, where XLA has no ragged product, each time with all."""
    each, total = model.experts_per_token or 0, model.n_experts or 1
    return each if target_device.platform() == "cpu" else each / total


def _not_needed_again(sizes: dict[str, int], model: ModelConfig) -> int:
    """Weights of a layer's last product: what it gives is added up and not looked at again, unless
    a norm or the experts' weights come after."""
    is_normed = model.norm != "none" and model.norm_placement != "before"
    if is_normed or (model.n_experts and model.feed_forward != "none"):
        return 0
    is_last = "attention.output" if model.feed_forward == "none" else "feed_forward.down"
    return sizes[f"blocks.{is_last}.kernel"]


def _of_attention(config: RunConfig) -> Passes:
    model, train = config
    length = config.sequence_length
    is_plain = not _in_blocks(config)
    pairs = 0.0
    for kind in model.layer_kinds():
        window = model.sliding_window if kind == "sliding" else None
        pairs += length**2 if is_plain else _pairs(length, window)
    once = 2 * pairs * _heads_width(model) / length
    recomputed = RECOMPUTED[train.remat]
    if is_plain:
        # the softmax between the two matmuls needs the scores again
        return Passes(2 * once, (recomputed.elementwise + recomputed.matmuls) * once, 4 * once)
    # in blocks the backward pass makes the scores again by itself
    return Passes(2 * once, (1 + 2 * recomputed.matmuls) * once, 4 * once)


def _in_blocks(config: RunConfig) -> bool:
    """Whether attention leaves out what no query sees, as `attention.attention` chooses."""
    model, train = config
    if train.drop_rate:
        return False
    if target_device.platform() == "cpu":
        return True
    query = jax.ShapeDtypeStruct((1, 1, 1, model.head_width), dtype_of(train))
    return model.attention_soft_cap is None and cudnn_attention.takes(query)


def _pairs(length: int, window: int | None) -> int:
    """Queries with keys that attention in blocks multiplies."""
    return sum((b.end - b.first) * (b.end - b.seen) for b in blocks(length, window))


def _of_head(config: RunConfig, vocabulary: int) -> Passes:
    once = 2 * config.model.emb_dim * vocabulary
    return Passes(once, 0, once if config.train.lora else 2 * once)


def _heads_width(model: ModelConfig) -> int:
    """Elements of all heads of a query."""
    return (model.n_heads or 0) * model.head_width if model.n_layers else 0
