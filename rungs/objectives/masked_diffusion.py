"""Masked diffusion (LLaDA, Nie et al. 2025, arXiv 2502.09992): fill in masked tokens of a text with
attention to both sides. `rungs/model/unmasking.py` generates. Axes as in `rungs/model/gpt.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rungs.data.tokens.sequences import IGNORED
from rungs.model.gpt import GPT
from rungs.objectives.next_token import NextToken
from rungs.parallel import collectives
from rungs.parallel.sharding import CONTEXT
from rungs.step.objective import Microbatch

MASKS = 2**32 - 1
"""Folded into a step's key, so that masks and dropout differ. No sequence has this index."""
LEAST_SHARE = 1e-3
"""Smallest expected share of masked tokens, so weights are at most 1,000; as in LLaDA's code."""
GOLDEN = np.uint32(0x9E3779B9)
"""2³² ÷ the golden ratio: its multiples modulo 2³² are spread evenly, however many there are."""


class MaskedDiffusion(NextToken):
    """The mean over tokens of an upper bound on −ln p(sequence), in nats (equation 3): of each
    sequence a share t of the tokens, uniform between 0 and 1, is masked, and the cross-entropy of
    those is weighted by 1 ÷ t."""

    validates_cross_entropy = False

    def given(self, model: GPT, microbatch: Microbatch) -> tuple[Array, Array, Array]:
        """Return the tokens with random ones masked, which depend on the microbatch's key and the
        sequence's index only. Shares of a step's sequences are evenly spread from a random one on,
        so that losses vary less (Kingma et al. 2021, arXiv 2107.00630, appendix I.1)."""
        tokens_BS, targets_BS, *_ = microbatch.arrays
        sequences_B, length = microbatch.sequences_B, targets_BS.shape[1]
        offset_key, key = jax.random.split(jax.random.fold_in(microbatch.key, MASKS))
        places_B = jax.random.bits(offset_key) + sequences_B.astype(jnp.uint32) * GOLDEN
        share_B = LEAST_SHARE + (1 - LEAST_SHARE) * places_B.astype(jnp.float32) * 2.0**-32
        shape = (length * collectives.axis_size(CONTEXT),)
        draw = lambda sequence: jax.random.uniform(jax.random.fold_in(key, sequence), shape)  # noqa: E731
        first = collectives.axis_index(CONTEXT) * length
        own_BS = jax.lax.dynamic_slice_in_dim(jax.vmap(draw)(sequences_B), first, length, axis=1)
        is_masked_BS = (own_BS < share_B[:, None]) & (targets_BS != IGNORED)
        masked_BS = jnp.where(is_masked_BS, model.config.mask_token, tokens_BS)
        weights_BS = jnp.broadcast_to(1 / share_B[:, None], targets_BS.shape)
        return masked_BS, jnp.where(is_masked_BS, targets_BS, IGNORED), weights_BS
