"""Which tokens a model's outputs depend on, by gradients and by changing tokens: no later ones, and
none of other rows. Axes as in `rungs/model/gpt.py`; Q queries, the examined outputs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rungs.checks.check import Check
from rungs.checks.checked_model import ROUNDING, CheckedModel, LogitsOf, relative_difference
from rungs.config.model_config import ModelConfig
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
    """Check that a position depends on itself and all earlier ones within the window, but on none
    that windows of windows don't reach."""
    model = checked.config.model
    own_QS = influence_QBS[np.arange(len(queries.row_Q)), queries.row_Q]
    distance_QS = queries.position_Q[:, None] - np.arange(own_QS.shape[-1])
    window = guaranteed_window(model) if model.n_layers else 1
    visible = own_QS[(distance_QS >= 0) & (distance_QS < window)]
    # through windows of windows; of what decays, something may be left anywhere
    reach = model.context_length if model.delta_net else 1 + model.n_layers * (window - 1)
    invisible = float(own_QS[(distance_QS < 0) | (distance_QS >= reach)].max(initial=0))
    moved = _moved_by_later_tokens(checked, logits_of)
    what = "own" if window == 1 else "own and earlier"
    own_input = "the targets are the inputs: it is enough that each position sees itself"
    return Check(
        "causality",
        f"gradient of later tokens {invisible:.1g}, {what} {visible.min():.1g} to"
        f" {visible.max():.1g}; changing later tokens moves logits by {moved:.1g}",
        f"0, {what} above 0; logits at most {ROUNDING:.0e}",
        invisible == 0 and bool(visible.min() > 0) and moved <= ROUNDING,
        (own_input,) if checked.config.train.target_offset == 0 else (),
    )


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
    """Return the number of tokens that a position certainly sees, itself included: in delta_net
    layers, itself, as all before it may have decayed."""
    kinds = set(model.layer_kinds())
    if kinds & {"global", "nope"}:
        return model.context_length
    return (model.sliding_window if "sliding" in kinds else None) or 1


def influence_on_logits(model: GPT, tokens_BS: Array, row_Q: Array, position_Q: Array) -> Array:
    """Return influence_QBS: the sum over D of |∂(direction · logits of the query) / ∂x|, for every
    embedded token x. The direction is random, so that effects don't cancel."""

    def logits(x_BSD: Array) -> Array:
        return model.unembed(model.hidden(tokens_BS, embedded_BSD=x_BSD).x_BSD)

    x_BSD = model.embed(tokens_BS, jnp.arange(tokens_BS.shape[-1]))
    logits_BSV, pull = jax.vjp(logits, x_BSD)
    direction_V = jax.random.normal(jax.random.key(0), logits_BSV.shape[-1:])

    def of(query: tuple[Array, Array]) -> Array:
        (gradient_BSD,) = pull(jnp.zeros_like(logits_BSV).at[query].set(direction_V))
        return jnp.abs(gradient_BSD).sum(axis=-1)

    return jax.lax.map(of, (row_Q, position_Q))
