"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): the model's prediction
module predicts the token after the next. Axes as in `rungs/model/gpt.py`."""

import jax
import jax.numpy as jnp
from jax import Array

from rungs.data.tokens.sequences import IGNORED
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.objectives.next_token import NextToken
from rungs.parallel import collectives
from rungs.parallel.sharding import CONTEXT
from rungs.step.objective import Aux, Microbatch, mean_over_targets


class MultiToken(NextToken):
    """The cross-entropy of next tokens plus `multi_token_weight` times the module's, both per next
    token (equations 21 to 25, with one module). The validation loss is only the first."""

    def loss(self, model: GPT, compute: Compute, microbatch: Microbatch) -> tuple[Array, Aux]:
        inputs_BS, targets_BS, *_ = microbatch.arrays
        starts_BS, dropout = self.starts(*microbatch.arrays), self.dropout(microbatch)
        found, module = model.hidden(inputs_BS, dropout, compute, starts_BS), model.prediction
        assert module is not None
        total = model.head_loss(found.x_BSD, targets_BS, compute)
        further_BS = _next(targets_BS, IGNORED)
        if starts_BS is not None:
            further_BS = jnp.where(_next(starts_BS, IGNORED) == starts_BS, further_BS, IGNORED)
        known_BSD = model.token_embedding(_next(inputs_BS, 0)).astype(compute.dtype)
        own = dropout.fold(model.config.n_layers + 1)
        x_BSD, routing = module(found.x_BSD, known_BSD, own, compute, starts_BS)
        further = model.head_loss(x_BSD, further_BS, compute, module=module)
        total += self.train.multi_token_weight * further
        routing = jax.tree.map(lambda *parts: jnp.concatenate(parts), found.routing, routing)
        return mean_over_targets(total, targets_BS, routing, self.train.load_balancing_weight)


def _next(array_BS: Array, after: int) -> Array:
    """Return what comes next at each place of the sequences, `after` at their end."""
    length = array_BS.shape[1]
    whole_BT = collectives.all_gather(array_BS, CONTEXT, joined=1)
    padded_BT = jnp.pad(whole_BT, ((0, 0), (0, 1)), constant_values=after)
    first = collectives.axis_index(CONTEXT) * length + 1
    return jax.lax.dynamic_slice_in_dim(padded_BT, first, length, axis=1)
