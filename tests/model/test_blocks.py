"""What the scan over blocks keeps for its backward pass, and the calls that lead through it."""

import re
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from rungs.config.optimization_config import Remat
from rungs.model.attention import sequence_contexts
from rungs.model.blocks import Compute, make_blocks, run_blocks
from rungs.model.feed_forward import FeedForward
from rungs.model.gpt import GPT
from rungs.model.kernels import blockwise_attention
from rungs.model.layers import NO_DROPOUT
from rungs.model.remat import checkpoint_layer
from tests.support.committed_runs import ROOT
from tests.support.configs import model_config

Shapes = Counter[tuple[int, ...]]


def scans_in(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from scans_in(inner)


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("pattern", [None, ["sliding", "global"]])
def test_the_forward_scan_keeps_no_copy_of_the_weights(
    remat: Remat, pattern: list[str] | None
) -> None:
    changes = {"layer_pattern": pattern, "sliding_window": 4} if pattern else {}
    config = model_config(n_layers=4, **changes)
    blocks = make_blocks(config, jax.random.key(0))
    graph, weights = nnx.split(blocks)
    x_BSD = jnp.ones((3, 7, config.emb_dim))  # no activation is as large as a kernel

    def loss(weights: nnx.State) -> jax.Array:
        compute = Compute(jnp.dtype(jnp.bfloat16), remat)
        blocks = nnx.merge(graph, weights)
        return run_blocks(blocks, config, x_BSD, NO_DROPOUT, compute)[0].sum()

    forward, backward = scans_in(jax.make_jaxpr(jax.grad(loss))(weights).jaxpr)
    kernels = Shapes(leaf.size for leaf in jax.tree.leaves(weights) if leaf.ndim > 2)
    kept = Shapes(out.aval.size for out in forward.outvars if out.aval.dtype == jnp.float32)
    gradients = Shapes(out.aval.size for out in backward.outvars)
    assert kernels <= gradients
    assert not kernels & kept


@pytest.mark.parametrize("remat", ["activations", "dots", "full"])
def test_the_weights_of_unrolled_layers_do_not_wait_for_the_backward_pass(remat: Remat) -> None:
    """Behind a barrier they would be float32 copies, cast once more."""
    config = model_config(n_layers=2)
    graph, weights = nnx.split(make_blocks(config, jax.random.key(0)))
    x_BSD = jnp.ones((3, 7, config.emb_dim))

    def loss(weights: nnx.State, x_BSD: jax.Array) -> jax.Array:
        compute, blocks = Compute(jnp.dtype(jnp.bfloat16), remat, 2), nnx.merge(graph, weights)
        return run_blocks(blocks, config, x_BSD, NO_DROPOUT, compute)[0].sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(weights, x_BSD).as_text()
    barriers = "".join(re.findall(r"optimization_barrier.*", program))
    waiting = set(re.findall(r"tensor<([\dx]+)xf32>", barriers))
    assert "x".join(map(str, x_BSD.shape)) in waiting
    layer_shapes = ((1, *leaf.shape[1:]) for leaf in jax.tree.leaves(weights) if leaf.ndim > 2)
    assert not waiting & {"x".join(map(str, shape)) for shape in layer_shapes}


@pytest.mark.parametrize(("remat", "hidden"), [("activations", 2), ("dots", 1), ("full", 0)])
def test_what_a_feed_forward_layer_keeps(remat: Remat, hidden: int) -> None:
    """Of the hidden width: what `up` returns, and the activation."""
    layer = FeedForward(model_config(ffn_dim=13), jax.random.key(0))
    x_BSD = jax.ShapeDtypeStruct((3, 7, layer.up.kernel.shape[0]), jnp.bfloat16)
    run = checkpoint_layer(lambda _, x, *__: layer(x)[0], remat)
    kept = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(run, 0.0, x, 0.0, 0.0)[1], x_BSD))
    assert sum(array.size == 3 * 7 * 13 for array in kept) == hidden


WIDE = {
    ("before", "dots"): 6,  # input; query, key, value; attention, and its projection
    ("before", "activations"): 8,  # two norms more; the sum instead of the projection
    ("after", "dots"): 7,  # the feed-forward layer's result, too, which the last norm needs
    ("after", "activations"): 7,  # two sums instead of two projections
    ("around", "dots"): 7,
    ("around", "activations"): 10,  # two norms and the sum more
}
"""How many arrays of the width of the residual stream a block keeps."""


@pytest.mark.parametrize(("placement", "remat"), WIDE)
def test_what_a_block_keeps_of_its_width(placement: str, remat: Remat) -> None:
    config = model_config(emb_dim=12, n_heads=2, ffn_dim=13, norm_placement=placement)
    graph, weights = nnx.split(make_blocks(config, jax.random.key(0)))
    context = sequence_contexts(config, 7, None)[config.repeated_kinds[0]]

    def layer(weights: nnx.State, x_BSD: jax.Array, *_: Any) -> jax.Array:
        block = nnx.merge(graph, jax.tree.map(lambda array: array[0], weights))
        return block(x_BSD, context).x_BSD

    run, x_BSD = checkpoint_layer(layer, remat), jnp.zeros((3, 7, 12), jnp.bfloat16)
    pull = jax.eval_shape(lambda *a: jax.vjp(run, *a, 0.0, 0.0)[1], weights, x_BSD)
    kept = jax.tree.leaves(pull)
    assert sum(array.size == x_BSD.size for array in kept) == WIDE[placement, remat]


def test_eight_calls_lead_from_the_loss_to_the_attention_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def kernel(query: jax.Array, *_: Any) -> jax.Array:
        package = str(ROOT / "rungs")
        frames = [it for it in traceback.extract_stack() if it.filename.startswith(package)]
        calls[:] = [frame.name for frame in frames]
        return query

    monkeypatch.setattr(blockwise_attention, "causal_attention", kernel)
    model, tokens = GPT(model_config(), jax.random.key(0)), jnp.zeros((1, 8), int)
    loss = nnx.value_and_grad(lambda model: model.summed_loss(tokens, tokens)[0])
    nnx.eval_shape(loss, model)
    layers = ["run_blocks", "run", "_run_one"]
    model_calls = ["summed_loss", "hidden", *layers, "__call__", "__call__", "attend"]
    assert calls == model_calls
