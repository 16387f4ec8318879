"""The matmul of each row with the matrix of its group: what the Pallas kernels compute, step by
step on the CPU, and the program as lowered for CUDA."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rungs.model.kernels import grouped_matmul
from rungs.model.kernels.grouped_matmul import pallas_grouped_matmul
from rungs.parallel import collectives, target_device
from rungs.parallel.sharding import DATA
from rungs.parallel.target_device import Target
from tests.support.configs import mesh_of

ROWS = 200


def arrays(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("counts", "inputs", "outputs"),
    [((70, 0, 1, 129), 40, 24), ((0, 0, 0, ROWS), 65, 130), ((64, 64, 72, 0), 64, 128)],
)
def test_each_row_has_the_matrix_of_its_group(
    counts: tuple[int, ...], inputs: int, outputs: int
) -> None:
    x, gradient = arrays(ROWS, inputs), arrays(ROWS, outputs)
    kernel = arrays(len(counts), inputs, outputs)
    y, pullback = jax.vjp(
        lambda x, kernel: pallas_grouped_matmul(x, kernel, jnp.asarray(counts), True), x, kernel
    )
    x_gradient, kernel_gradient = pullback(gradient)
    first = 0
    for group, count in enumerate(counts):
        rows = slice(first, first + count)
        matrix, own, own_gradient = (
            part.astype(np.float64) for part in (kernel[group], x[rows], gradient[rows])
        )
        np.testing.assert_allclose(y[rows], own @ matrix, atol=1e-4)
        np.testing.assert_allclose(x_gradient[rows], own_gradient @ matrix.T, atol=1e-4)
        np.testing.assert_allclose(kernel_gradient[group], own.T @ own_gradient, atol=1e-4)
        first += count


def test_a_bfloat16_kernel_gradient_is_summed_in_float32() -> None:
    x, kernel = jnp.asarray(arrays(ROWS, 32), jnp.bfloat16), jnp.asarray(arrays(2, 32, 16))
    counts = jnp.asarray([ROWS - 3, 3])
    y, pullback = jax.vjp(lambda kernel: pallas_grouped_matmul(x, kernel, counts, True), kernel)
    (found,) = pullback(jnp.ones_like(y))
    expected = np.asarray(x[:-3], np.float64).sum(axis=0)[:, None] + np.zeros((1, 16))
    assert y.dtype == found.dtype == jnp.float32
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-4)


def test_a_gpu_step_calls_one_kernel_forward_and_two_backward() -> None:
    """In the program as lowered for CUDA, so that no GPU is needed; no matmul is left to XLA."""
    mesh = mesh_of(2)
    x, kernel = jnp.ones((128, 32), jnp.bfloat16), jnp.ones((4, 32, 16))

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        counts = collectives.to_varying(jnp.asarray([0, 30, 30, 4]), DATA)
        y = grouped_matmul.grouped_matmul(x, kernel, counts)
        return collectives.psum(jnp.sin(y).sum(), DATA)

    def lowered(capability: str, is_compiled: bool) -> str:
        with target_device.trace_for(Target("gpu", capability), is_compiled):
            step = jax.shard_map(
                jax.grad(loss, (0, 1)),
                mesh=mesh,
                in_specs=(PartitionSpec(DATA), PartitionSpec()),
                out_specs=(PartitionSpec(DATA), PartitionSpec()),
            )
            trace = jax.jit(step).trace(x, kernel)
        text: str = trace.lower(lowering_platforms=("cuda",)).as_text()
        return text

    assert "xla.gpu.triton" not in lowered("8.6", is_compiled=False)
    ampere, turing = (lowered(capability, is_compiled=True) for capability in ("8.6", "7.5"))
    assert len(re.findall(r"custom_call @__gpu\$xla.gpu.triton", ampere)) == 3
    assert "stablehlo.dot_general" not in ampere
    assert "ragged_dot" not in ampere
    assert "xla.gpu.triton" not in turing
    assert "ragged_dot" in turing
