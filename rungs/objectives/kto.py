"""KTO (Ethayarajh et al. 2024, arXiv 2402.01306): learning from answers that are desirable or not.

Axes as in `rungs/model/gpt.py`; P answers. The rows of B alternate: an answer, and one of another
prompt to the same prompt, which only measures the KL divergence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.model.blocks import Compute
from rungs.model.feed_forward import Routing
from rungs.model.gpt import GPT
from rungs.objectives.preferences import Preferences
from rungs.parallel import collectives
from rungs.parallel.sharding import DATA
from rungs.step.objective import Microbatch


class KTO(Preferences):
    """The mean over answers of w · (1 − σ(± β (r − z))), + if an answer is desirable. r is its log
    π − log π_ref, and z, without gradient, the mean of that over the microbatch's answers of other
    prompts, at least 0 (section 4.1). Arrays: those of `Preferences`, and desirable_BS."""

    def log_probs(
        self, model: GPT, compute: Compute, microbatch: Microbatch
    ) -> tuple[Array, Routing | None]:
        """As in `Preferences`, but answers of other prompts take only a forward pass."""
        inputs_BS, targets_BS, *_ = microbatch.arrays
        graph, state = nnx.split(model)
        frozen = nnx.merge(graph, jax.lax.stop_gradient(state))
        other_BS = frozen.log_probs(inputs_BS[1::2], targets_BS[1::2], compute=compute)
        arrays, sequences_B = (inputs_BS[::2], targets_BS[::2]), microbatch.sequences_B[::2]
        own = microbatch._replace(arrays=arrays, sequences_B=sequences_B)
        own_BS, routing = super().log_probs(model, compute, own)
        return jnp.stack([own_BS, other_BS], axis=1).reshape(targets_BS.shape), routing

    def losses(  # type: ignore[override]
        self, sums_B: Any, reference_B: Any, _: Any, desirable_B: Any
    ) -> Array:
        train, ratios_B = self.train, sums_B - reference_B
        other = jax.lax.stop_gradient(ratios_B[1::2].mean())
        kl = jnp.maximum(collectives.psum(other, DATA) / collectives.axis_size(DATA), 0)
        is_desirable_P = desirable_B[::2] > 0
        weights_P = jnp.where(is_desirable_P, train.desirable_weight, train.undesirable_weight)
        behind_P = jnp.where(is_desirable_P, 1, -1) * (kl - ratios_B[::2])
        return weights_P * jax.nn.sigmoid(train.preference_beta * behind_P)

    def means(  # type: ignore[override]
        self, sums_B: Any, reference_B: Any, _: Any, desirable_B: Any
    ) -> dict[str, Any]:
        ratios_B, is_desirable_P = sums_B - reference_B, desirable_B[::2] > 0
        kl = max(ratios_B[1::2].mean(), 0)
        chosen, rejected = (
            [array_B[::2][of_P].mean() if of_P.any() else np.nan for array_B in (ratios_B, sums_B)]
            for of_P in (is_desirable_P, ~is_desirable_P)
        )
        return {
            "margin": self.train.preference_beta * (chosen[0] - rejected[0]),
            "accuracy": ((ratios_B[::2] > kl) == is_desirable_P).mean(),
            "chosen_log_prob": chosen[1],
            "rejected_log_prob": rejected[1],
            "kl": kl,
        }
