"""Generates text by filling in masked tokens (LLaDA, Nie et al. 2025, arXiv 2502.09992, section 2.4
and algorithm 5). The new tokens start masked; each pass predicts all that still are, and keeps the
predictions that are most probable. Axes as in `gpt.py`."""

import functools
from collections.abc import Iterator, Sequence
from itertools import takewhile

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from rungs.common.errors import RunFailure, UserError
from rungs.model.blocks import Compute
from rungs.model.generation import Request, Texts, row_keys
from rungs.model.gpt import GPT, check_tokens
from rungs.model.sampling import next_tokens


class Unmasker:
    """Continues token ids with a bidirectional model, as `Generator` does with others, in some
    `passes` through the model, None for one per new token."""

    def __init__(self, model: GPT, dtype: DTypeLike, passes: int | None = None) -> None:
        self._model, self._passes, self.dtype = model, passes, jnp.dtype(dtype)
        self.context_length = model.config.context_length

    def generate(self, prompts: Sequence[Sequence[int]], request: Request) -> Texts:
        """Return the new tokens of each prompt, up to a stop token. Raises ValueError if a token is
        not the model's; UserError if a text doesn't fit the context, or a setting is wrong;
        RunFailure if the model's logits are NaN."""
        sampling, new, longest = request.sampling, request.new_tokens, max(map(len, prompts))
        sampling.check()
        if sampling.repetition_penalty != 1:
            raise UserError("repetition_penalty: not supported with masked_diffusion")
        if longest + new > self.context_length:
            lengths = f"a prompt of {longest:,} tokens and {new:,} new ones"
            raise UserError(f"{lengths} don't fit the model's context of {self.context_length:,}")
        tokens_BS = np.array([[*text, *[0] * (longest + new - len(text))] for text in prompts])
        check_tokens(self._model.config, tokens_BS)
        lengths_B, keys_B = np.array([*map(len, prompts)]), row_keys(request.seed, len(prompts))
        fill_in = nnx.jit(functools.partial(_fill_in, request, self._passes or new, self.dtype))
        filled_BS = np.asarray(fill_in(self._model, tokens_BS, lengths_B, keys_B))
        added = [row[at:][:new].tolist() for row, at in zip(filled_BS, lengths_B, strict=True)]
        if any(self._model.config.mask_token in row for row in added):
            raise RunFailure("the model's logits are NaN; use another checkpoint, or float32")
        return [[*takewhile(lambda new: new not in sampling.stop_tokens, row)] for row in added]

    def stream(self, prompts: Sequence[Sequence[int]], request: Request) -> Iterator[Texts]:
        """Yield the result of `generate`; no token is final before the last pass."""
        yield self.generate(prompts, request)


def _fill_in(request: Request, passes: int, dtype: jnp.dtype, model: GPT, *arrays: Array) -> Array:
    """Return tokens_BS with the new ones after prompts of lengths_B filled in, with keys_B; masks
    where logits are NaN. Padding after them is another document."""
    (tokens_BS, lengths_B, keys_B), new, mask = arrays, request.new_tokens, model.config.mask_token
    distance_BS = jnp.arange(tokens_BS.shape[1]) - lengths_B[:, None]
    starts_BS = jnp.where(distance_BS < new, 0, lengths_B[:, None] + new)
    split = functools.partial(jax.random.split, num=tokens_BS.shape[1])
    draw = jax.vmap(functools.partial(next_tokens, request.sampling), (1, None, 1), 1)

    def fill(number: Array | int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        tokens_BS, is_masked_BS = state
        found = model.forward(tokens_BS, compute=Compute(dtype), starts_BS=starts_BS)
        log_p_BSV = jax.nn.log_softmax(found.logits_BSV.at[..., mask].set(-jnp.inf))
        keys_BS = jax.vmap(lambda key: split(jax.random.fold_in(key, number)))(keys_B)
        drawn_BS = draw(log_p_BSV, jnp.zeros_like(log_p_BSV[:, 0], bool), keys_BS)
        chosen_BS1 = jnp.take_along_axis(log_p_BSV, drawn_BS[..., None], -1, mode="clip")
        rank_BS = jnp.where(is_masked_BS, -chosen_BS1[..., 0], jnp.inf).argsort().argsort()
        is_kept_BS = rank_BS < (number + 1) * new // passes - number * new // passes
        return jnp.where(is_kept_BS, drawn_BS, tokens_BS), is_masked_BS & ~is_kept_BS

    is_new_BS = (distance_BS >= 0) & (distance_BS < new)
    start = jnp.where(is_new_BS, mask, tokens_BS), is_new_BS
    return jax.lax.fori_loop(0, passes, fill, start)[0]
