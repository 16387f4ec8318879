"""From logits to the next token: greedily, or drawn from what the settings leave of the
distribution. Axes as in `model.py`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rungs.common.errors import UserError


class Sampling(NamedTuple):
    """How a next token is chosen, the settings acting in the order in which they stand here, and
    which end the text."""

    repetition_penalty: float = 1.0
    """Logits of tokens that stand in the text already are divided by this where positive,
    multiplied where negative (Keskar et al. 2019, section 4.1)."""
    temperature: float = 0.0
    """Logits are divided by this. 0: greedy, always the most likely token."""
    top_k: int | None = None
    """Only the k most likely tokens (Fan et al. 2018); those as likely as the k-th stay too."""
    top_p: float | None = None
    """Only the most likely tokens that together just reach this probability, the nucleus
    (Holtzman et al. 2020)."""
    min_p: float | None = None
    """Only tokens at least this share as likely as the most likely (Nguyen et al. 2024)."""
    stop_tokens: tuple[int, ...] = ()
    """Any of these ends a text."""

    def check(self) -> None:
        """Raises UserError, a line for each setting that makes no sense."""
        lines = [
            f"--{name.replace('_', '-')}: {value:g} is not allowed; must be {allowed}"
            for name, allowed, fits in (
                ("repetition_penalty", "above 0", lambda v: v > 0),
                ("temperature", "0 (greedy) or above", lambda v: v >= 0),
                ("top_k", "at least 1", lambda v: v >= 1),
                ("top_p", "above 0 and at most 1", lambda v: 0 < v <= 1),
                ("min_p", "from 0 to 1", lambda v: 0 <= v <= 1),
            )
            if (value := getattr(self, name)) is not None and not fits(value)
        ]
        if lines:
            raise UserError("\n".join(lines))


GREEDY = Sampling()


def next_tokens(sampling: Sampling, logits_BV: Array, seen_BV: Array, keys_B: Array) -> Array:
    """The chosen token of each row: tokens_B, int32.

    Args:
        logits_BV: float32.
        seen_BV: which tokens stand in the row's text; only the repetition penalty looks at them.
        keys_B: a random key for each row; greedy choice does not look at them.
    """
    logits_BV = penalized(logits_BV, seen_BV, sampling.repetition_penalty)
    if not sampling.temperature:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    kept_BV = filtered(logits_BV / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys_B, kept_BV).astype(jnp.int32)


def penalized(logits_BV: Array, seen_BV: Array, penalty: float) -> Array:
    """Logits with those of seen tokens made less likely."""
    if penalty == 1.0:
        return logits_BV
    lowered = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return jnp.where(seen_BV, lowered, logits_BV)


def filtered(logits_BV: Array, sampling: Sampling) -> Array:
    """Logits with −∞ for the tokens that top-k, top-p and min-p leave out, in that order."""
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[-1]:
        least = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    if sampling.top_p is not None and sampling.top_p < 1:
        falling = -jnp.sort(-logits_BV, axis=-1)
        chances = jax.nn.softmax(falling)
        needed = jnp.cumsum(chances, axis=-1) - chances < sampling.top_p
        least = jnp.min(jnp.where(needed, falling, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    if sampling.min_p:
        least = logits_BV.max(axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    return logits_BV
