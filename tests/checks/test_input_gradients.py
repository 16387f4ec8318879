"""Why gradients of many outputs are computed one at a time (`jax.lax.map`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.mark.long
@pytest.mark.xfail(jax.__version_info__ < (0, 11), strict=True, reason="jax-ml/jax#39103")
def test_jax_can_compute_gradients_of_many_outputs_at_once() -> None:
    """XLA's CPU compiler reads wrong rows of an operand that is broadcast over the outputs, when
    YNNPACK sums the products: `--xla_cpu_experimental_ynn_fusion_type=` gives the right result, and
    so do jax 0.11 and the program without `jax.jit`. Gradients in training have no such operand.
    Without jax 0.10, `_influence` could use `jax.vmap` instead of `jax.lax.map`."""
    x = jax.random.normal(jax.random.key(0), (2, 128, 128))
    gradients = jax.random.normal(jax.random.key(1), (16, 2, 128, 128))

    def pull(x: jax.Array, gradients: jax.Array) -> jax.Array:
        def norm(x: jax.Array) -> jax.Array:
            return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True))

        found: jax.Array = jax.vmap(jax.vjp(norm, x)[1])(gradients)[0]
        return found

    np.testing.assert_allclose(jax.jit(pull)(x, gradients), pull(x, gradients), atol=1e-4)
