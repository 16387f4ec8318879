"""Which tokens a model's outputs depend on, by gradients and by changing tokens: no later ones, and
none of other rows. Axes as in `rungs/model/gpt.py`; Q queries, the examined outputs."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rungs.checks.check import Check
from rungs.checks.checked_model import ROUNDING, CheckedModel, LogitsOf, relative_difference
from rungs.config.model_config import ModelConfig
from rungs.model.blocks import keep_output
from rungs.model.gpt import GPT

MAX_QUERIES = 16


class Queries(NamedTuple):
    """The examined outputs: a row and a position for each."""

    row_Q: np.ndarray
    position_Q: np.ndarray

    @classmethod
    def spread_over(cls, rows: int, length: int) -> "Queries":
        """Return positions spread from first to last, with alternating rows."""
        position_Q = np.unique(np.linspace(0, length - 1, MAX_QUERIES).astype(int))
        return cls(np.arange(len(position_Q)) % rows, position_Q)


def check_causality(
    checked: CheckedModel, logits_of: LogitsOf, queries: Queries, influence_QBS: np.ndarray
) -> Check:
    """Check that a position depends exactly on itself and earlier ones within the window."""
    model = checked.config.model
    own_QS = influence_QBS[np.arange(len(queries.row_Q)), queries.row_Q]
    distance_QS = queries.position_Q[:, None] - np.arange(own_QS.shape[-1])
    window = guaranteed_window(model) if model.n_layers else 1
    visible = own_QS[(distance_QS >= 0) & (distance_QS < window)]
    later = float(own_QS[distance_QS < 0].max(initial=0))
    beyond_window, notes = _influence_beyond_windows(checked, queries)
    moved = _moved_by_later_tokens(checked, logits_of)
    beyond = f", beyond the window {beyond_window:.1g}" if notes else ""
    if checked.config.train.target_offset == 0:
        notes += ("the targets are the inputs: it is enough that each position sees itself",)
    what = "own" if window == 1 else "own and earlier"
    return Check(
        "causality",
        f"gradient of later tokens {later:.1g}, {what} {visible.min():.1g} to"
        f" {visible.max():.1g}{beyond}; changing later tokens moves logits by {moved:.1g}",
        f"0, {what} above 0; logits at most {ROUNDING:.0e}",
        later == 0 and beyond_window == 0 and bool(visible.min() > 0) and moved <= ROUNDING,
        notes,
    )


def _influence_beyond_windows(
    checked: CheckedModel, queries: Queries
) -> tuple[float, tuple[str, ...]]:
    """Return the largest influence of positions that no window up to a layer reaches, and a note on
    how far back windows reach."""
    model, length = checked.config.model, checked.inputs_BS.shape[-1]
    reaches: list[int] = []
    for layer, kind in enumerate(model.layer_kinds()):
        steps = (layer + 1) * ((model.sliding_window or length) - 1)
        if kind != "sliding" or steps >= length - 1:
            break
        reaches.append(steps)
    if not reaches:
        return 0.0, ()
    influence_LQBS = np.asarray(checked.compiled(influence_on_layers)(checked.inputs_BS, *queries))
    distance_QS = queries.position_Q[:, None] - np.arange(length)
    largest = max(
        float(influence_LQBS[layer].sum(axis=1)[distance_QS > steps].max())
        for layer, steps in enumerate(reaches)
    )
    layers = ", ".join(f"layer {layer}: {steps}" for layer, steps in enumerate(reaches))
    return largest, (f"positions that windows reach back, up to {layers}",)


def _moved_by_later_tokens(checked: CheckedModel, logits_of: LogitsOf) -> float:
    """Return the change of logits when later tokens change."""
    inputs_BS = checked.inputs_BS
    half = inputs_BS.shape[-1] // 2
    changed_BS = checked.changed_tokens(np.arange(inputs_BS.shape[-1]) >= half)
    return relative_difference(logits_of(changed_BS)[:, :half], logits_of(inputs_BS)[:, :half])


def check_rows(
    checked: CheckedModel, logits_of: LogitsOf, queries: Queries, influence_QBS: np.ndarray
) -> Check:
    """Check that the sequences of a batch do not affect each other."""
    count = len(checked.inputs_BS)
    if count == 1:
        return Check.skipped("rows", "there is only one sequence")
    is_other_QB = queries.row_Q[:, None] != np.arange(count)
    others = float(influence_QBS[is_other_QB].max())
    is_odd_B = np.arange(count) % 2 == 1
    before = logits_of(checked.inputs_BS)
    moved = max(
        relative_difference(
            logits_of(checked.changed_tokens(changed_B[:, None]))[~changed_B], before[~changed_B]
        )
        for changed_B in (is_odd_B, ~is_odd_B)
    )
    return Check(
        "rows",
        f"gradient of other rows {others:.1g}; changing their tokens moves logits by {moved:.1g}",
        f"0; at most {ROUNDING:.0e}",
        others == 0 and moved <= ROUNDING,
    )


def guaranteed_window(model: ModelConfig) -> int:
    """Return the number of tokens that a position certainly sees, itself included."""
    is_global = any(kind != "sliding" for kind in model.layer_kinds())
    return model.context_length if is_global else model.sliding_window or model.context_length


def influence_on_logits(model: GPT, tokens_BS: Array, row_Q: Array, position_Q: Array) -> Array:
    """Return influence_QBS: the sum over D of |∂(direction · logits of the query) / ∂x|, for every
    embedded token x. The direction is random, so that effects don't cancel."""
    return _influence(
        lambda x: model.unembed(model.hidden(tokens_BS, embedded_BSD=x).x_BSD),
        model,
        tokens_BS,
        row_Q,
        position_Q,
    )


def influence_on_layers(model: GPT, tokens_BS: Array, row_Q: Array, position_Q: Array) -> Array:
    """Return influence_LQBS: the same for the hidden state after each layer."""

    def hidden(x_BSD: Array) -> Array:
        kept: Array = model.hidden(tokens_BS, observe=keep_output, embedded_BSD=x_BSD).kept
        return kept

    def of(layer: Array) -> Array:
        return _influence(lambda x: hidden(x)[layer], model, tokens_BS, row_Q, position_Q)

    return jax.lax.map(of, jnp.arange(model.config.n_layers))


def _influence(
    output_of: Callable[[Array], Array],
    model: GPT,
    tokens_BS: Array,
    row_Q: Array,
    position_Q: Array,
) -> Array:
    x_BSD = model.embed(tokens_BS, jnp.arange(tokens_BS.shape[-1]))
    output, pull = jax.vjp(output_of, x_BSD)
    direction = jax.random.normal(jax.random.key(0), output.shape[-1:])

    def of(query: tuple[Array, Array]) -> Array:
        row, position = query
        (gradient_BSD,) = pull(jnp.zeros_like(output).at[row, position].set(direction))
        return jnp.abs(gradient_BSD).sum(axis=-1)

    return jax.lax.map(of, (row_Q, position_Q))
