"""The product of activations with a weight matrix, with a derivative of its own.

`plain_product` and what JAX derives from it mean the same, but are slow in two ways. Where the
operands are narrower than the sum, the derivative meets a float32 gradient and multiplies in
float32. And XLA's CPU compiler gives a product to its fast library only where the left operand is
summed over its last axis, as it lies in memory, which the gradient of a weight does not do.

Axes: M rows, I inputs, O outputs.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from rungs.parallel import collectives


def plain_product(x_MI: Array, kernel_IO: Array) -> Array:
    """x · kernel in the type of x, summed in float32: y_MO."""
    return _dot(x_MI, kernel_IO.astype(x_MI.dtype), 1, 0)


def product(x_MI: Array, kernel_IO: Array) -> Array:
    """As `plain_product`; the operands of its gradients have the type of x, too."""
    return _product(*collectives.to_common_varying(x_MI, kernel_IO))


@jax.custom_vjp
def _product(x_MI: Array, kernel_IO: Array) -> Array:
    return plain_product(x_MI, kernel_IO)


def _forward(x_MI: Array, kernel_IO: Array) -> tuple[Array, tuple[Array, Array]]:
    return plain_product(x_MI, kernel_IO), (x_MI, kernel_IO)


def _backward(kept: tuple[Array, Array], gradient_MO: Array) -> tuple[Array, Array]:
    x_MI, kernel_IO = kept
    gradient_MO = gradient_MO.astype(x_MI.dtype)
    x_gradient_MI = _dot(gradient_MO, kernel_IO.astype(x_MI.dtype), 1, 1)
    kernel_gradient_IO = _sum_over_rows(x_MI, gradient_MO)
    return x_gradient_MI.astype(x_MI.dtype), kernel_gradient_IO.astype(kernel_IO.dtype)


_product.defvjp(_forward, _backward)


def _sum_over_rows(left_MI: Array, right_MO: Array) -> Array:
    """leftᵀ · right; on a CPU the narrower of them is what is turned round in memory."""
    if left_MI.shape[1] <= right_MO.shape[1]:
        return opaque(_dot(transposed(left_MI), right_MO, 1, 0))
    return opaque(_dot(transposed(right_MO), left_MI, 1, 0)).T


def transposed(x: Array) -> Array:
    """x with its last two axes exchanged, on a CPU in memory, too."""
    turned = x.swapaxes(-1, -2)
    if jax.default_backend() != "cpu":
        return turned
    return opaque(with_layout_constraint(turned, Layout(tuple(range(x.ndim)))))


def opaque(x: Array) -> Array:
    """x as something that XLA's CPU compiler does not see through: of operands and products that
    are transposed it makes one product of another form, and of those in bfloat16 it has code for
    some only, and stops."""
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    over = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, over, preferred_element_type=jnp.float32)
