"""The largest singular value is that of NumPy's LAPACK, and comes without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungs.inspect.watch_arrays import largest_singular_value

LAYERS = 2


def with_values(values: np.ndarray, inputs: int, outputs: int) -> np.ndarray:
    """Return random matrices with these singular values, and zeros."""
    rng = np.random.default_rng(len(values))
    left, right = (
        np.linalg.qr(rng.normal(size=(LAYERS, size, len(values))))[0] for size in (inputs, outputs)
    )
    return (left * values) @ right.swapaxes(-1, -2)


def random_matrices(inputs: int, outputs: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(LAYERS, inputs, outputs), scale=scale)


@pytest.mark.parametrize(
    ("matrices", "tolerance"),
    [
        (with_values(10.0 ** -np.arange(8), 64, 96), 1e-5),
        (with_values(np.ones(64), 64, 64), 1e-5),
        (with_values(np.array([100, 99.9, 50, 1]), 64, 96), 1e-3),
        (random_matrices(64, 64), 0.02),
        (random_matrices(1, 5), 1e-5),
        (random_matrices(64, 64, 1e15), 0.02),
        (random_matrices(64, 64, 1e-15), 0.02),
        (np.zeros((LAYERS, 64, 64)), 0),
    ],
)
def test_it_is_that_of_numpy(matrices: np.ndarray, tolerance: float) -> None:
    expected = np.linalg.svd(np.float32(matrices).astype(float), compute_uv=False)[:, 0]
    found = jax.jit(largest_singular_value)(jnp.float32(matrices))
    np.testing.assert_allclose(found, expected, rtol=tolerance)


def test_what_is_not_finite_stays_so() -> None:
    matrices = random_matrices(16, 16)
    matrices[0, 3, 3] = np.nan
    found = largest_singular_value(jnp.float32(matrices))
    assert np.isfinite(found).tolist() == [False, True]


def test_no_kernel_waits_for_threads_of_its_own_pool() -> None:
    matrices = jax.ShapeDtypeStruct((LAYERS, 64, 32), jnp.float32)
    assert "custom_call" not in jax.jit(largest_singular_value).lower(matrices).as_text()
