"""The gradient of a batch, and trainable parameters that wrongly receive none: layers and experts
of stacked parameters, and rows of embeddings, with a gradient of exactly 0. Axes as in
`model/gpt.py`."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array

from rungs.checks.check import Check
from rungs.checks.checked_model import CheckedModel
from rungs.config.model_config import ModelConfig
from rungs.config.train_config import TrainConfig
from rungs.data.tokens.sequences import IGNORED
from rungs.model.feed_forward import EXPERTS, Routing
from rungs.model.gpt import GPT
from rungs.model.lora import DOWN, UP
from rungs.objectives.next_token import NextToken
from rungs.parallel.sharding import Layout, dotted
from rungs.step.gradients import Summed, summed_gradients
from rungs.step.nonfinite import ALL_FINITE
from rungs.step.state import named_arrays

Arrays = dict[str, np.ndarray]


class Gradient(NamedTuple):
    """Gradient of a batch, in the run's own `compute_dtype`."""

    arrays: dict[str, np.ndarray]
    """Gradients by parameter name."""
    is_finite: bool
    routing: Routing | None


class CheckedBatch(NamedTuple):
    """The batch of a gradient."""

    inputs_BS: np.ndarray
    targets_BS: np.ndarray
    expert_tokens_LE: np.ndarray | None
    """Tokens routed to each expert; None without experts."""


class DeadParameters(NamedTuple):
    """Parts of parameters that receive no gradient."""

    parts: int
    """Number of parts that need a gradient."""
    dead: list[str]
    """Parts that receive none but need one."""
    exemptions: list[str]
    """A line for each kind of part that needs no gradient."""
    smallest: tuple[float, str]
    """The smallest non-zero norm of a gradient, and its part."""


class _Part(NamedTuple):
    """A part of a parameter that can be dead on its own."""

    parameter: str
    gradient: np.ndarray
    layer: int | None = None
    expert: int | None = None
    row: str = ""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        expert = "" if self.expert is None else f", expert {self.expert}"
        return self.parameter + layer + expert + self.row


def gradient_of(
    checked: CheckedModel, train: TrainConfig
) -> Callable[[np.ndarray, np.ndarray], Gradient]:
    """Return a function of inputs_BS and targets_BS that computes a train step's gradient."""
    layout, wrt = Layout.of(None), checked.optimizer.wrt

    def of(model: GPT, *batch_ABS: Array) -> Summed:
        parts = NextToken(train), train, layout, model, wrt, len(batch_ABS[0])
        return summed_gradients(*parts)(batch_ABS, jax.random.key(0), None)

    compiled = checked.compiled(of)

    def gradient(inputs_BS: np.ndarray, targets_BS: np.ndarray) -> Gradient:
        state, aux, first_nonfinite_A = compiled(*checked.in_microbatches(inputs_BS, targets_BS))
        flat = nnx.to_flat_state(state)
        arrays = {dotted(path): np.asarray(variable.get_value()) for path, variable in flat}
        return Gradient(arrays, bool((first_nonfinite_A == ALL_FINITE).all()), aux.routing)

    return gradient


def check_gradients(checked: CheckedModel, gradient: Gradient) -> Check:
    """Check that every trainable parameter receives a gradient."""
    if not gradient.is_finite:
        return Check.skipped("gradients", "finite must pass first")
    routing = gradient.routing
    expert_tokens_LE = None if routing is None else np.asarray(routing.counts_E).sum(axis=0)
    found = find_dead_parameters(
        checked.config.model,
        gradient.arrays,
        {name: np.asarray(array) for name, array in named_arrays(checked.model).items()},
        CheckedBatch(checked.inputs_BS, checked.targets_BS, expert_tokens_LE),
    )
    norm, name = found.smallest
    return Check(
        "gradients",
        f"{found.parts:,} parts, {len(found.dead):,} without a gradient; smallest norm {norm:.0e}"
        f" in {name}",
        "none without",
        not found.dead,
        (*(f"no gradient: {part}" for part in found.dead), *found.exemptions),
    )


def find_dead_parameters(
    model: ModelConfig, gradient: Arrays, parameters: Arrays, batch: CheckedBatch
) -> DeadParameters:
    """Find the parts of parameters that receive no gradient from a batch. `gradient` and
    `parameters` have gradients and values of trainable parameters by dotted name."""
    alive: list[tuple[float, str]] = []
    dead: list[str] = []
    exemptions: dict[str, None] = {}
    for name, array in gradient.items():
        for part in _parts(model, name, array, batch):
            if reason := _exemption(model, part, parameters, batch):
                exemptions[reason] = None
            elif part.gradient.any():
                alive.append((float(np.linalg.norm(part.gradient)), str(part)))
            else:
                dead.append(str(part))
    parts = len(alive) + len(dead)
    return DeadParameters(parts, dead, list(exemptions), min(alive, default=(0.0, "none")))


def _parts(
    model: ModelConfig, name: str, array: np.ndarray, batch: CheckedBatch
) -> Iterator[_Part]:
    counts_BS = batch.targets_BS != IGNORED
    if name == "token_embedding.embedding":
        for token in np.unique(batch.inputs_BS[counts_BS]):
            yield _Part(name, array[token], row=f", token {token}")
    elif name == "position_embedding.embedding":
        for position in np.flatnonzero(counts_BS.any(axis=0)):
            yield _Part(name, array[position], row=f", position {position}")
    elif not name.startswith("blocks."):
        yield _Part(name, array)
    elif model.n_experts and name.startswith(EXPERTS):
        for layer, experts in enumerate(array):
            for expert, own in enumerate(experts):
                yield _Part(name, own, layer, expert)
    else:
        yield from (_Part(name, own, layer) for layer, own in enumerate(array))


def _exemption(
    model: ModelConfig, part: _Part, parameters: Arrays, batch: CheckedBatch
) -> str | None:
    """Return why a part needs no gradient, or None if it needs one."""
    name = part.parameter
    attention = name.partition("blocks.attention.")[2]
    if name.endswith(DOWN) and not parameters[name.removesuffix(DOWN) + UP].any():
        return "LoRA's A has no gradient while B is zero, as it is at the start"
    has_equal_effect = (  # on all scores of a query
        model.positions != "rope" and not model.qk_norm and model.attention_soft_cap is None
    )
    if attention == "key.bias" and has_equal_effect:
        return "a key bias adds the same to all scores of a query, which softmax ignores"
    counts_LE = batch.expert_tokens_LE
    if part.expert is not None and counts_LE is not None and not counts_LE[part.layer, part.expert]:
        return f"no token went to expert {part.expert} of layer {part.layer}"
    return None
