"""Choose the next token from logits, greedily or by sampling. Axes as in `gpt.py`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from rungs.common.errors import UserError
from rungs.config.option_values import LEAST_SCALE, MOST_SCALE

_SCALES = f"from {LEAST_SCALE:g} to {MOST_SCALE:g}"


class Sampling(NamedTuple):
    """How the next token is chosen. The settings apply in this order."""

    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor on negative ones, of tokens that occur in the text
    (Keskar et al. 2019, section 4.1)."""
    temperature: float = 0.0
    """Divisor of the logits. 0 is greedy: always the most likely token."""
    top_k: int | None = None
    """Keep the k most likely tokens (Fan et al. 2018), and those tied with the k-th."""
    top_p: float | None = None
    """Keep the nucleus: the smallest set of most likely tokens with at least this total probability
    (Holtzman et al. 2020), and those tied with its least likely."""
    min_p: float | None = None
    """Keep tokens with at least this times the highest probability (Nguyen et al. 2024)."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the text."""

    def check(self, name_of: Callable[[str], str] = str) -> None:
        """Raise UserError with a line for each setting that is out of range; `name_of` gives a
        setting's name in it."""
        lines = [
            f"{name_of(name)}: {value:.10g} is not allowed; must be {allowed}"
            for name, allowed, is_valid in (
                ("repetition_penalty", _SCALES, _is_scale),
                ("temperature", f"0 (greedy) or {_SCALES}", lambda v: not v or _is_scale(v)),
                ("top_k", "at least 1", lambda v: v >= 1),
                ("top_p", "above 0 and at most 1", lambda v: 0 < v <= 1),
                ("min_p", "from 0 to 1", lambda v: 0 <= v <= 1),
            )
            if (value := getattr(self, name)) is not None and not is_valid(value)
        ]
        if lines:
            raise UserError("\n".join(lines))


def _is_scale(value: float) -> bool:
    return LEAST_SCALE <= value <= MOST_SCALE


GREEDY = Sampling()
UNDEFINED = np.iinfo(np.int32).max
"""Result for logits with a NaN; not a token id."""


def next_tokens(sampling: Sampling, logits_BV: Array, seen_BV: Array, keys_B: Array) -> Array:
    """Return the chosen token of each row: tokens_B, int32; `UNDEFINED` if a logit is NaN.

    Args:
        logits_BV: float32.
        seen_BV: true for tokens that occur in the row's text; for the repetition penalty only.
        keys_B: one random key per row; unused if greedy."""
    if sampling.repetition_penalty != 1.0:
        lowered_BV = _lowered(logits_BV, sampling.repetition_penalty)
        logits_BV = jnp.where(seen_BV, lowered_BV, logits_BV)
    if not sampling.temperature:
        return first_largest(logits_BV)
    logits_BV = mask_unlikely(logits_BV / sampling.temperature, sampling)
    tokens_B = jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0]  # NaN if any is
    return jnp.where(jnp.isnan(chosen_B), UNDEFINED, tokens_B)


def first_largest(logits_BV: Array) -> Array:
    """Return the index of the largest logit of each row, int32, the first of equal ones;
    `UNDEFINED` with a NaN. It is `argmax` as two reductions that a CPU vectorizes."""
    is_largest_BV = logits_BV == logits_BV.max(axis=-1, keepdims=True)
    index_V = jnp.arange(logits_BV.shape[-1], dtype=jnp.int32)
    return jnp.where(is_largest_BV, index_V, UNDEFINED).min(axis=-1)


def _lowered(logits_BV: Array, penalty: ArrayLike) -> Array:
    """Return the logits of tokens made less likely by the repetition penalty."""
    return jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)


def mask_unlikely(logits_BV: Array, sampling: Sampling) -> Array:
    """Return logits with −∞ for tokens excluded by top-k, top-p and min-p, in that order."""
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[-1]:
        logits_BV = _mask_below(logits_BV, jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:])
    if sampling.top_p is not None and sampling.top_p < 1:
        descending_BV = -jnp.sort(-logits_BV, axis=-1)
        logits_BV = _mask_below(logits_BV, _least_in_nucleus(descending_BV, sampling.top_p))
    if sampling.min_p:
        least_B1 = logits_BV.max(axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logits_BV = _mask_below(logits_BV, least_B1)
    return logits_BV


def _mask_below(logits_BV: Array, least_B1: Array) -> Array:
    return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)


def _least_in_nucleus(descending_BV: Array, top_p: ArrayLike) -> Array:
    """Return the smallest logit in the nucleus of `top_p`, from sorted logits."""
    probabilities = jax.nn.softmax(descending_BV)
    top_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)  # not 0 in float32
    is_in = jnp.cumsum(probabilities, axis=-1) - probabilities < top_p
    return jnp.min(
        descending_BV, axis=-1, keepdims=True, where=is_in | (top_p >= 1), initial=jnp.inf
    )


class RowSampling(NamedTuple):
    """The sampling settings of each row of a batch, so that one program serves them all."""

    temperature_B: Array | np.ndarray
    top_k_B: Array | np.ndarray
    top_p_B: Array | np.ndarray
    min_p_B: Array | np.ndarray
    repetition_penalty_B: Array | np.ndarray

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> Self:
        """Return the settings of rows. Stop tokens are left to the caller."""
        everything = np.iinfo(np.int32).max
        return cls(
            np.array([each.temperature for each in samplings], np.float32),
            np.array([min(each.top_k or everything, everything) for each in samplings], np.int32),
            np.array([1 if each.top_p is None else each.top_p for each in samplings], np.float32),
            np.array([each.min_p or 0 for each in samplings], np.float32),
            np.array([each.repetition_penalty for each in samplings], np.float32),
        )

    def next_tokens(self, logits_BV: Array, seen_BV: Callable[[], Array], keys_B: Array) -> Array:
        """Return what `next_tokens` returns for each row with its settings. Work that no row needs
        is skipped when the program runs."""
        penalty_B1 = self.repetition_penalty_B[:, None]

        def penalized() -> Array:
            is_lowered_BV = seen_BV() & (penalty_B1 != 1)
            return jnp.where(is_lowered_BV, _lowered(logits_BV, penalty_B1), logits_BV)

        logits_BV = jax.lax.cond((penalty_B1 != 1).any(), penalized, lambda: logits_BV)
        is_greedy_B = self.temperature_B == 0
        first_B = first_largest(logits_BV)

        def sampled() -> Array:
            scaled_BV = logits_BV / jnp.where(is_greedy_B, 1, self.temperature_B)[:, None]
            is_cut = (self.top_k_B < logits_BV.shape[-1]) | (self.top_p_B < 1) | (self.min_p_B > 0)
            masked_BV = jax.lax.cond(is_cut.any(), self._masked, lambda x: x, scaled_BV)
            tokens_B = jax.vmap(jax.random.categorical)(keys_B, masked_BV).astype(jnp.int32)
            return jnp.where((first_B == UNDEFINED) | is_greedy_B, first_B, tokens_B)

        return jax.lax.cond(is_greedy_B.all(), lambda: first_B, sampled)

    def _masked(self, logits_BV: Array) -> Array:
        """`mask_unlikely` with the settings of each row."""
        descending_BV = -jnp.sort(-logits_BV, axis=-1)
        last_B1 = jnp.minimum(self.top_k_B, logits_BV.shape[-1])[:, None] - 1
        least_B1 = jnp.take_along_axis(descending_BV, last_B1, axis=-1)
        nucleus_BV = _mask_below(descending_BV, least_B1)
        least_B1 = jnp.maximum(least_B1, _least_in_nucleus(nucleus_BV, self.top_p_B[:, None]))
        logits_BV = _mask_below(logits_BV, least_B1)
        least_B1 = logits_BV.max(axis=-1, keepdims=True) + jnp.log(self.min_p_B)[:, None]
        return _mask_below(logits_BV, least_B1)
