"""Parameters and FLOPs per token of a run, from its configs. Axes as in `rungs/model/gpt.py`."""

import math
import re
from collections import Counter
from typing import Any, NamedTuple

from rungs.checkpointing.checkpoint_folder import find_weights
from rungs.checkpointing.weights_file import Weights
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.config.train_config import TrainConfig
from rungs.model import lora
from rungs.model.feed_forward import EXPERTS
from rungs.parallel.sharding import abstract_mesh
from rungs.planning.compiled_step import equations, trace_step
from rungs.run.folder import existing_run_path
from rungs.step.state import Shapes, shapes_of

TOKENS_PER_PARAMETER = 20
"""Compute-optimal training tokens per parameter (Hoffmann et al. 2022, table 3)."""


class ParameterCounts(NamedTuple):
    """Number of a model's parameters, by purpose."""

    embedding: int
    """Token embedding and learned positions, including a tied head."""
    attention: int
    """Includes Gated DeltaNet in its place."""
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
    """Queries with keys, and attention weights with values; the gated delta rule."""
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
    the full square S · S (Chowdhery et al. 2022, appendix B), with `length` S, and as H the mean of
    the widths of queries and values. In a delta_net layer, 18 per element of its states, which are
    read twice and written once by each token."""
    sizes = _active_sizes(shapes, model)
    looked_up = "position_embedding.embedding", "value_embedding.embedding"
    in_matmuls = sum(sizes.values()) - sum(sizes.get(name, 0) for name in looked_up)
    if not model.tied_embeddings:
        in_matmuls -= sizes["token_embedding.embedding"]
    in_matmuls += model.prediction_module * model.vocab_size * model.emb_dim
    delta_layers = sum(kind == "delta_net" for kind in model.layer_kinds())
    layers = model.n_layers - delta_layers + model.prediction_module  # which uses the head again
    attention = 6 * layers * _heads_width(model) * length
    return 6 * in_matmuls + attention + 18 * delta_layers * _state_size(model)


def training_flops_per_token(config: RunConfig) -> float:
    """Return the model FLOPs per token of a run's step, those of a teacher beside it included."""
    model, length = config.model, config.sequence_length
    own = model_flops_per_token(shapes_of(model, config.train.lora), model, length)
    return own + teacher_flops_per_token(config)


def model_beside(train: TrainConfig) -> ModelConfig | None:
    """Return the config of the teacher that predicts beside a run's steps, which may be a run that
    isn't trained yet; None without one, or if its predictions are stored. Raises UserError if it
    isn't there."""
    return None if train.teacher is None or train.teacher_top_k else model_at(train.teacher)


def model_at(place: str) -> ModelConfig:
    """Return the config of a run, which may not be trained yet, or of weights. Raises UserError if
    there is none."""
    run = existing_run_path(place)
    if run and (run / run_config.MODEL_FILE).is_file():
        return run_config.load_any_run(run).model
    return Weights(find_weights(place)).header.model


def teacher_flops_per_token(config: RunConfig) -> float:
    """Return the model FLOPs per token of a teacher that predicts beside each step: its forward
    pass, a third of its training. Raises UserError if there is no such teacher any more."""
    teacher = model_beside(config.train)
    if teacher is None:
        return 0.0
    return model_flops_per_token(shapes_of(teacher, None), teacher, config.sequence_length) / 3


def hardware_flops_per_token(config: RunConfig) -> Flops:
    """Return the FLOPs per token that a step computes on one device, recomputation included,
    counted in the traced step. Only matmuls count; the rest is small."""
    alone = ShardingConfig(mode="dp", data=1, tensor=1)
    train = config.train.model_copy(update={"sharding": alone})
    mesh: Any = abstract_mesh(alone.sizes, alone.axes)
    found: Counter[tuple[str, str]] = Counter()
    for one, runs, scopes in equations(trace_step(RunConfig(config.model, train), mesh)):
        words = re.findall(r"\w+", scopes)
        if "optimizer" not in words:
            named = {"loss": "head", "attention": "attention"}
            part = next((named[word] for word in words if word in named), "layers")
            is_backward = "transpose" in words
            again = "rematted_computation" in words
            phase = "recompute" if again else "backward" if is_backward else "forward"
            found[part, phase] += runs * matmul_flops(one)
    microbatch_tokens = train.microbatch_size * config.sequence_length
    tokens = train.microbatches_per_step * microbatch_tokens
    parts = {
        part: Passes(*(found[part, phase] / tokens for phase in Passes._fields))
        for part in Flops._fields
    }
    return Flops(**parts)


def matmul_flops(equation: Any) -> int:
    """Return the FLOPs of an equation if it is a matmul, else 0."""
    arrays = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * math.prod(arrays[0].shape[axis] for axis in contracted) * arrays[-1].size
    if equation.primitive.name == "ragged_dot_general":
        # of M·K, K·N and M·N elements, either an operand or the result has them for each group
        one, other, groups, result = arrays
        return 2 * math.isqrt(one.size * other.size * result.size // groups.size)
    return 0


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
    module = module.removeprefix("dense_")
    module = "attention" if module == "delta_net" else module
    return module if module in ("attention", "feed_forward", "head") else "other"


def _active_sizes(shapes: Shapes, model: ModelConfig) -> dict[str, int]:
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    for name in filter(_is_of_experts, sizes if model.n_experts else ()):
        sizes[name] = sizes[name] * (model.experts_per_token or 0) // (model.n_experts or 1)
    return sizes


def _is_of_experts(name: str) -> bool:
    """Return whether each expert has its own copy of this parameter."""
    return any(part in name for part in EXPERTS)


def _heads_width(model: ModelConfig) -> int:
    """Return the elements of a query and a value over all heads."""
    return (model.n_heads or 0) * (model.query_width + model.value_width) if model.n_layers else 0


def _state_size(model: ModelConfig) -> int:
    """Return the elements of the states of a delta_net layer."""
    own = model.delta_net
    return own.key_heads * own.values_per_key * own.key_dim * own.value_width if own else 0
