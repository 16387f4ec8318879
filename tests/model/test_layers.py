"""Projections: what each kind of device computes, next to float64."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungs.model.layers import Linear, LowRank, LowRankParam, scaled_normal
from rungs.parallel.target_device import Target, trace_for

ROWS, INPUTS, OUTPUTS = 64, 48, 32
BFLOAT16 = float(jnp.finfo(jnp.bfloat16).eps)
TARGETS = [Target("cpu"), Target("gpu", "9.0"), Target("tpu")]


def linear() -> Linear:
    made = Linear(
        {"emb": INPUTS},
        {"ffn": OUTPUTS},
        lambda *a: scaled_normal(*a, scale=0.1),
        jax.random.key(0),
    )
    assert made.bias is not None
    made.bias[...] = jnp.linspace(-1, 1, OUTPUTS)
    return made


def pulled_back() -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function of the kernel, the bias, x and dy that returns y and three gradients. JAX
    keeps what it has traced of each function."""

    def apply(kernel: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
        made = linear()
        assert made.bias is not None
        made.kernel[...], made.bias[...] = kernel, bias
        return made(x)

    def both(kernel: jax.Array, bias: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(apply, kernel, bias, x)
        return y, *pull(dy)

    return both


def arguments() -> tuple[jax.Array, ...]:
    made, rng = linear(), np.random.default_rng(0)
    assert made.bias is not None
    x, dy = (
        jnp.asarray(rng.normal(size=(ROWS, width)), jnp.bfloat16) for width in (INPUTS, OUTPUTS)
    )
    kernel = made.kernel[...].astype(jnp.bfloat16).astype(jnp.float32)
    return kernel, made.bias[...], x, dy


@pytest.mark.parametrize("target", TARGETS, ids=lambda it: it.platform)
def test_a_projection_and_its_gradients_are_exact_up_to_rounding(target: Target) -> None:
    kernel, bias, x, dy = arguments()
    with trace_for(target, is_compiled=True):
        found = jax.jit(pulled_back())(kernel, bias, x, dy)
    wide_kernel, wide_bias, wide_x, wide_dy = (
        np.asarray(one, np.float64) for one in (kernel, bias, x, dy)
    )
    wanted = (
        wide_x @ wide_kernel + wide_bias,
        wide_x.T @ wide_dy,
        wide_dy.sum(axis=0),
        wide_dy @ wide_kernel.T,
    )
    # what stays float32 is a sum that no device rounds on the way
    tolerances = {jnp.dtype(jnp.float32): 2e-6, jnp.dtype(jnp.bfloat16): 2 * BFLOAT16}
    assert [one.dtype.name for one in found] == ["bfloat16", "float32", "float32", "bfloat16"]
    for one, exact in zip(found, wanted, strict=True):
        distance = np.abs(np.asarray(one, np.float64) - exact).max()
        assert distance <= tolerances[one.dtype] * np.abs(exact).max()


@pytest.mark.parametrize("target", TARGETS, ids=lambda it: it.platform)
def test_on_a_gpu_matmuls_round_what_is_rounded_next(target: Target) -> None:
    with trace_for(target, is_compiled=True):
        text = str(jax.make_jaxpr(pulled_back())(*arguments()))
    results = sorted(re.findall(r":(\w+)\[[\d,]*\] = dot_general", text))
    rounded = "bf16" if target.platform == "gpu" else "f32"
    assert results == sorted([rounded, rounded, "f32"])  # y, and the gradients of x and the kernel


def test_what_is_added_up_stays_float32_on_a_gpu() -> None:
    def apply(x: jax.Array) -> jax.Array:
        made = linear()
        shapes = (INPUTS, 4), (4, OUTPUTS)
        down, up = (LowRankParam(jnp.ones(shape), inputs=1, axes=("emb", "")) for shape in shapes)
        made.low_rank = LowRank(down, up, 0.5)
        return made(x)

    with trace_for(TARGETS[1], is_compiled=True):
        text = str(jax.make_jaxpr(apply)(arguments()[2]))
    assert re.findall(r":(\w+)\[[\d,]*\] = dot_general", text) == ["f32"] * 3


@pytest.mark.parametrize("target", TARGETS, ids=lambda it: it.platform)
def test_on_a_gpu_the_gradient_of_a_projection_lies_in_memory(target: Target) -> None:
    """Without that, XLA sums up the bias's gradient where it computes y's, and writes in float32
    what both need."""
    with trace_for(target, is_compiled=True):
        text = str(jax.make_jaxpr(pulled_back())(*arguments()))
    barred = f":bf16[{ROWS},{OUTPUTS}] = optimization_barrier"
    assert (barred in text) == (target.platform == "gpu")
