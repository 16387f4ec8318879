"""Norms and their derivatives on each kind of device, against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungs.model.kernels import norms
from rungs.parallel.target_device import Target, trace_for
from tests.support.tiny_model import quick_jit

EPSILON = 1e-5
TOLERANCES = {"float32": 2e-6, "bfloat16": 1e-2}


def exact(
    x: np.ndarray, dy: np.ndarray, scale: np.ndarray, bias: np.ndarray | None
) -> list[np.ndarray]:
    """Return y, and the gradients of x, scale and bias, each by its definition in float64: column
    by column of the Jacobian of a row. Without a bias, of RMS norm."""
    width = x.shape[-1]
    rows, of_y = x.reshape(-1, width), dy.reshape(-1, width)
    mean = rows.mean(-1, keepdims=True) if bias is not None else np.zeros((len(rows), 1))
    root = np.sqrt(np.square(rows - mean).mean(-1, keepdims=True) + EPSILON)
    unit = (rows - mean) / root
    centering = np.eye(width) - (1 / width if bias is not None else 0)
    jacobians = (centering - unit[:, :, None] * unit[:, None, :] / width) / root[..., None]
    dx = np.einsum("ri,rij->rj", of_y * scale, jacobians).reshape(x.shape)
    y = (unit * scale + (0 if bias is None else bias)).reshape(x.shape)
    vectors = [(of_y * unit).sum(0)] + ([] if bias is None else [of_y.sum(0)])
    return [y, dx, *vectors]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 5, 3, 8), "float32"), ((2, 5, 3, 8), "bfloat16"), ((1, 9), "float32")],
)
@pytest.mark.parametrize("kind", ["layer norm", "RMS norm"])
@pytest.mark.parametrize("has_parameters", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_norm_and_its_gradients_are_exact(
    platform: str, has_parameters: bool, kind: str, shape: tuple[int, ...], dtype: str
) -> None:
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(1, 2, shape), dtype) for _ in range(2))
    scale, bias = (jnp.asarray(rng.normal(size=shape[-1]), jnp.float32) for _ in range(2))
    if not has_parameters:
        scale, bias = jnp.ones_like(scale), jnp.zeros_like(bias)
    of_kind = (scale, bias) if kind == "layer norm" else (scale,)
    vectors = of_kind if has_parameters else ()
    norm = norms.Norm(EPSILON, is_centered=kind == "layer norm")

    @quick_jit
    def both(x: jax.Array, dy: jax.Array, *vectors: jax.Array) -> Any:
        y, pull = jax.vjp(lambda *arrays: norms.normalize(norm, *arrays), x, *vectors)
        return y, *pull(dy)

    with trace_for(Target(platform)):
        found = both(x, dy, *vectors)
    x64, dy64, scale64, bias64 = (np.asarray(array, np.float64) for array in (x, dy, scale, bias))
    wanted = exact(x64, dy64, scale64, bias64 if kind == "layer norm" else None)
    assert [array.dtype for array in found] == [dtype, dtype, *["float32"] * len(vectors)]
    for one, other in zip(found, wanted[: len(found)], strict=True):
        distance = np.abs(np.asarray(one, np.float64) - other).max()
        assert distance <= TOLERANCES[dtype] * max(np.abs(other).max(), 1)
