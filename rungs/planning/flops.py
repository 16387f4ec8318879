"""Parameters and FLOPs per token of a run, from its configs. Axes as in `rungs/model/gpt.py`."""

import math
from typing import NamedTuple

import jax

from rungs.checkpointing.checkpoint_folder import find_weights
from rungs.checkpointing.weights_file import Weights
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.model import lora, remat
from rungs.model.attention import fastest_kernel
from rungs.model.kernels import (
    blockwise_attention,
    grouped_matmul,
    splash_attention,
    triton_attention,
)
from rungs.optim.precision import dtype_of
from rungs.run.folder import existing_run_path
from rungs.step.state import Shapes, shapes_of

TOKENS_PER_PARAMETER = 20
"""Compute-optimal training tokens per parameter (Hoffmann et al. 2022, table 3)."""


class ParameterCounts(NamedTuple):
    """Number of a model's parameters, by purpose."""

    embedding: int
    """Token embedding and learned positions, including a tied head."""
    attention: int
    feed_forward: int
    """Includes the router of a mixture of experts."""
    norms: int
    head: int
    low_rank: int
    """LoRA adapters."""
    other: int
    """Parameters of other modules."""

    @property
    def total(self) -> int:
        return sum(self)


class Passes(NamedTuple):
    """FLOPs per token of training."""

    forward: float
    recompute: float
    """The part of the forward pass that the backward pass repeats."""
    backward: float

    @property
    def total(self) -> float:
        return sum(self)


class Flops(NamedTuple):
    """FLOPs per token of a training step, summed over devices. A multiply-add counts as 2."""

    layers: Passes
    """Matmuls with the weights of the layers."""
    attention: Passes
    """Queries with keys, and attention weights with values."""
    head: Passes
    """Matmuls with the weights of the head."""

    @property
    def total(self) -> float:
        return sum(part.total for part in self)


def count_parameters(shapes: Shapes) -> ParameterCounts:
    """Return the number of a model's parameters. `shapes` is from `state.shapes_of`."""
    return _by_group({name: math.prod(shape) for name, shape in shapes.items()})


def count_active_parameters(shapes: Shapes, model: ModelConfig) -> ParameterCounts:
    """Return the number of parameters that a token uses, with only the experts it is routed to."""
    return _by_group(_active_sizes(shapes, model))


def model_flops_per_token(shapes: Shapes, model: ModelConfig, length: int) -> float:
    """Return the model FLOPs per token of training, the basis of utilization (MFU): 6 per active
    weight in a matmul (Kaplan et al. 2020, section 2.1), and 12 · L · N · H · S for attention over
    the full square S · S (Chowdhery et al. 2022, appendix B), with `length` S."""
    sizes = _active_sizes(shapes, model)
    looked_up = "position_embedding.embedding", "value_embedding.embedding"
    in_matmuls = sum(sizes.values()) - sum(sizes.get(name, 0) for name in looked_up)
    if not model.tied_embeddings:
        in_matmuls -= sizes["token_embedding.embedding"]
    return 6 * in_matmuls + 12 * model.n_layers * _heads_width(model) * length


def training_flops_per_token(config: RunConfig) -> float:
    """Return the model FLOPs per token of a run's step, those of a teacher beside it included."""
    model, length = config.model, config.sequence_length
    own = model_flops_per_token(shapes_of(model, config.train.lora), model, length)
    return own + teacher_flops_per_token(config)


def model_beside(train: TrainConfig) -> ModelConfig | None:
    """Return the config of the teacher that predicts beside a run's steps, which may be a run that
    isn't trained yet; None without one, or if its predictions are stored. Raises UserError if it
    isn't there."""
    if train.teacher is None or train.teacher_top_k:
        return None
    run = existing_run_path(train.teacher)
    if run and (run / run_config.MODEL_FILE).is_file():
        return run_config.load_any_run(run).model
    return Weights(find_weights(train.teacher)).header.model


def teacher_flops_per_token(config: RunConfig) -> float:
    """Return the model FLOPs per token of a teacher that predicts beside each step: its forward
    pass, a third of its training. Raises UserError if there is no such teacher any more."""
    teacher = model_beside(config.train)
    if teacher is None:
        return 0.0
    return model_flops_per_token(shapes_of(teacher, None), teacher, config.sequence_length) / 3


def hardware_flops_per_token(config: RunConfig, vocabulary: int | None = None) -> Flops:
    """Return the FLOPs per token that a step computes, recomputation included. Only matmuls count;
    the rest is small. `vocabulary` is the number of rows in memory, if more than `vocab_size`."""
    model, train = config
    once = 2 * model.emb_dim * (vocabulary or model.vocab_size)
    is_next_token = isinstance(train, TrainConfig) and train.objective == "next_token"
    again = 0 if is_next_token else once  # `cross_entropy.map_logits`
    head = Passes(once, again, once if train.lora else 2 * once)
    if not model.n_layers:
        return Flops(Passes(0, 0, 0), Passes(0, 0, 0), head)
    return Flops(_of_layers(config), _of_attention(config), head)


def _by_group(sizes: dict[str, int]) -> ParameterCounts:
    found = dict.fromkeys(ParameterCounts._fields, 0)
    for name, size in sizes.items():
        found[_group(name)] += size
    return ParameterCounts(**found)


def _group(name: str) -> str:
    """Return the field of `ParameterCounts` that a parameter belongs to."""
    if name.endswith(lora.LOW_RANK_NAMES):
        return "low_rank"
    if "norm" in name:
        return "norms"
    module = name.removeprefix("blocks.").split(".")[0]
    if module.endswith("_embedding"):
        return "embedding"
    return module if module in ("attention", "feed_forward", "head") else "other"


def _active_sizes(shapes: Shapes, model: ModelConfig) -> dict[str, int]:
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    for name in filter(_is_of_experts, sizes if model.n_experts else ()):
        sizes[name] = sizes[name] * (model.experts_per_token or 0) // (model.n_experts or 1)
    return sizes


def _is_of_experts(name: str) -> bool:
    """Return whether each expert has its own copy of this parameter."""
    return name.startswith("blocks.feed_forward.") and ".router." not in name


def _of_layers(config: RunConfig) -> Passes:
    model, train = config
    shapes = shapes_of(model, train.lora).items()
    low_rank = {name: math.prod(s) for name, s in shapes if name.endswith(lora.LOW_RANK_NAMES)}
    kernels = ((name, s) for name, s in shapes if name.endswith(".kernel"))
    sizes = {name: math.prod(s) for name, s in kernels if name.startswith("blocks.")}
    if model.n_experts and not grouped_matmul.is_dense():  # else tokens pass through all experts
        share = (model.experts_per_token or 0) / model.n_experts
        for name in filter(_is_of_experts, sizes):
            sizes[name] = round(sizes[name] * share)
    weights = sum(sizes.values())
    forward = 2 * (weights + sum(low_rank.values()))
    recompute, recomputed = 0.0, remat.RECOMPUTED[remat.layer_loop(train, model).remat]
    if recomputed.matmuls:
        recompute = forward - 2 * _not_recomputed(sizes, model)
    elif recomputed.elementwise:
        recompute = 2 * sum(size for name, size in low_rank.items() if name.endswith(lora.DOWN))
    weight_gradients = 0 if train.lora else 2 * weights
    backward = 2 * weights + weight_gradients + 4 * sum(low_rank.values())
    return Passes(forward, recompute, backward)


def _not_recomputed(sizes: dict[str, int], model: ModelConfig) -> int:
    """Return the size of a layer's last matmul. Its result is only added to the residual stream, so
    the backward pass needs it only if a norm or, with a grouped matmul, expert weights follow."""
    is_normed = model.norm != "none" and model.norm_placement != "before"
    is_weighted = model.n_experts and model.feed_forward != "none" and not grouped_matmul.is_dense()
    if is_normed or is_weighted:
        return 0
    is_last = "attention.output" if model.feed_forward == "none" else "feed_forward.down"
    return sizes[f"blocks.{is_last}.kernel"]


def _of_attention(config: RunConfig) -> Passes:
    model, train = config
    length = config.sequence_length
    is_blockwise = not train.drop_rate  # as `Attention` chooses
    pairs = attention_pairs(config) if is_blockwise else model.n_layers * length**2
    once = 2 * pairs * _heads_width(model) / length
    recomputed = remat.RECOMPUTED[remat.layer_loop(train, model).remat]
    if is_blockwise:
        repeated = _repeated_matmuls(config) + 2 * recomputed.matmuls
        return Passes(2 * once, repeated * once, 4 * once)
    # recomputing the softmax between the two matmuls takes the scores
    return Passes(2 * once, (recomputed.elementwise + recomputed.matmuls) * once, 4 * once)


def _repeated_matmuls(config: RunConfig) -> int:
    """Return the matmuls that the backward pass of blockwise attention repeats: the scores, unless
    weights are kept; with two kernels, scores in both and the weights' gradient in the second."""
    model, train = config
    shape = 1, config.sequence_length, 1, model.head_width
    query = jax.ShapeDtypeStruct(shape, dtype_of(train))
    kernel = fastest_kernel(query, model.attention_soft_cap, train.documents == "separate")
    if kernel in (splash_attention, triton_attention):
        return 3
    recomputed = remat.RECOMPUTED[remat.layer_loop(train, model).remat]
    return 1 if recomputed.elementwise or not blockwise_attention.keeps_weights() else 0


def attention_pairs(config: RunConfig) -> int:
    """Return the query-key pairs that blockwise attention multiplies per sequence, all layers."""
    windows = {"sliding": config.model.sliding_window}
    return sum(
        (block.end - block.first) * (block.end - block.first_key)
        for kind in config.model.layer_kinds()
        for block in blockwise_attention.query_blocks(config.sequence_length, windows.get(kind))
    )


def _heads_width(model: ModelConfig) -> int:
    """Return the elements of a query over all heads."""
    return (model.n_heads or 0) * model.head_width if model.n_layers else 0
