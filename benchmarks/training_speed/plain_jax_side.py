"""A side of `train_speed.py`: the same GPT in JAX as one first writes it, the loop to compare with.

Flax NNX modules in a list, all attention scores at once, `optax.MultiSteps`, one jitted call per
microbatch, whose loss is read at once. It uses nothing of Rungs. Reads how many steps to take from
each line of stdin and answers with the loss of the last one.
"""

import functools
import json
import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

LayerNorm = functools.partial(nnx.LayerNorm, epsilon=1e-5)


class PlainBlock(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.attention_norm = LayerNorm(width, rngs=rngs)
        self.feed_forward_norm = LayerNorm(width, rngs=rngs)
        self.query_key_value = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.output = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.output(self.attention(self.attention_norm(x)))
        return x + self.down(nnx.gelu(self.up(self.feed_forward_norm(x))))

    def attention(self, x: Array) -> Array:
        batch, length, width = x.shape
        split = self.query_key_value(x).reshape(batch, length, 3, self.heads, -1)
        query, key, value = split[:, :, 0], split[:, :, 1], split[:, :, 2]
        scores = jnp.einsum("bqnh,bknh->bnqk", query, key) / jnp.sqrt(width // self.heads)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        y = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), value)
        return y.reshape(batch, length, width)


class PlainGPT(nnx.Module):
    def __init__(self, vocab: int, length: int, width: int, heads: int, layers: int) -> None:
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(vocab, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([PlainBlock(width, heads, rngs) for _ in range(layers)])
        self.norm = LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def set_weights(model: PlainGPT, weights: Mapping[str, np.ndarray]) -> None:
    parameters = nnx.to_flat_state(nnx.state(model, nnx.Param))
    for path, parameter in parameters:
        parameter.set_value(jnp.asarray(weights[".".join(map(str, path))]))
    nnx.update(model, nnx.from_flat_state(parameters))


@nnx.jit
def train_microbatch(model: PlainGPT, optimizer: nnx.Optimizer, sequences: Array) -> Array:
    def mean_loss(model: PlainGPT) -> Array:
        logits, targets = model(sequences[:, :-1]), sequences[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, gradient = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradient)
    return loss


def main() -> None:
    asked = json.loads(sys.argv[1])
    model = PlainGPT(*(asked[key] for key in ("vocab", "length", "width", "heads", "layers")))
    set_weights(model, np.load(asked["weights"]))
    batches = np.load(asked["batches"])  # steps, A, B, S + 1
    matrices = functools.partial(jax.tree.map, lambda parameter: parameter.ndim > 1)
    adamw = optax.adamw(asked["learning_rate"], 0.9, 0.95, weight_decay=0.1, mask=matrices)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    accumulated = optax.MultiSteps(clipped, batches.shape[1])
    optimizer = nnx.Optimizer(model, accumulated, wrt=nnx.Param)
    taken = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            microbatches = batches[taken % len(batches)]
            losses = [train_microbatch(model, optimizer, each).item() for each in microbatches]
            taken += 1
        print(json.dumps(float(np.mean(losses))), flush=True)


if __name__ == "__main__":
    main()
