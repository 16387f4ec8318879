"""temporary_bytes, each_layer_again, segments_again and matmuls_kept."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from assignment.systems.given import layer
from assignment.systems.tests import reference
from assignment.systems.tests.devices import memory
from assignment.systems.tests.equations import UNROLLED, count
from assignment.tests.mistakes import check, explained

LAYERS, ROWS, WIDTH, HIDDEN, SEGMENTS = 256, 512, 16, 64, 16
X_BYTES, HIDDEN_BYTES = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN
Forward = Callable[..., jax.Array]


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SHAPES = (
    {"up": array(LAYERS, WIDTH, HIDDEN), "down": array(LAYERS, HIDDEN, WIDTH)},
    array(ROWS, WIDTH),
)


def gradients(forward: Forward) -> Callable[..., Any]:
    return jax.grad(lambda weights, x_BD: jnp.square(forward(weights, x_BD)).sum() / 2, (0, 1))


def plain(weights: Any, x_BD: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, weights: (layer(weights, x), None), x_BD, weights)[0]


def temporary(forward: Forward) -> int:
    """Return the bytes of everything that is kept for the gradients, or needed on the way."""
    assert count_matmuls(forward) < LAYERS, UNROLLED
    return memory(jax.jit(gradients(forward)), *SHAPES)


def check_gradients(forward: Forward) -> None:
    weights = reference.random_weights(4, 6, 10)
    batch = reference.random_batch([1, 1, 1], 6)
    batch = batch._replace(targets_BD=jnp.zeros((3, 6)))
    outputs = reference.outputs(weights, batch.inputs_BD)
    check(jax.jit(forward)(weights, batch.inputs_BD), outputs)
    check(
        jax.jit(gradients(forward))(weights, batch.inputs_BD)[0], reference.sums(weights, batch)[1]
    )


def count_matmuls(forward: Forward) -> int:
    """Return how many matmuls a layer and its gradients have."""
    return count(gradients(forward), "dot_general", *SHAPES)


def test_temporary_bytes_are_counted_without_computing(code: ModuleType) -> None:
    weights = {"up": array(4, 1 << 10, 1 << 12), "down": array(4, 1 << 12, 1 << 10)}
    arguments = weights, array(1 << 26, 1 << 10)  # 256 GiB
    why = (
        "the arguments only have a shape and a dtype: lower and compile the function for them, and"
        " call nothing"
    )
    with explained({"ShapeDtypeStruct": why, "TypeError": why}):
        found = code.temporary_bytes(gradients(plain), *arguments)
    compiled = jax.jit(gradients(plain)).lower(*arguments).compile()
    analysis: Any = compiled.memory_analysis()
    temporary = analysis.temp_size_in_bytes
    others = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    why = "temp_size_in_bytes is the one for what lies between arguments and results"
    check(
        found,
        temporary,
        {
            f"arguments are counted alone: {why}": analysis.argument_size_in_bytes,
            f"results are counted alone: {why}": analysis.output_size_in_bytes,
            f"arguments are counted as well: {why}": temporary + analysis.argument_size_in_bytes,
            f"arguments and results are counted as well: {why}": temporary + others,
        },
        rtol=0,
        atol=0,
    )


def test_each_layer_again_keeps_inputs_alone(code: ModuleType) -> None:
    check_gradients(code.each_layer_again)
    found, everything = temporary(code.each_layer_again), temporary(plain)
    assert found < 0.9 * everything, (
        f"{found:,} bytes, as without jax.checkpoint ({everything:,}). One around the whole loop"
        " saves nothing: before its backward pass all layers are computed again, and all their"
        " activations kept at once. Put it around a layer, and call what it returns"
    )
    expected = LAYERS * X_BYTES
    assert found < expected + 8 * HIDDEN_BYTES, (
        f"{found:,} bytes, where the inputs of all layers are {expected:,}: more than these is kept"
    )


def test_segments_again_keep_few_inputs(code: ModuleType) -> None:
    check_gradients(lambda weights, x_BD: code.segments_again(weights, x_BD, 2))
    found = temporary(lambda weights, x_BD: code.segments_again(weights, x_BD, SEGMENTS))
    inputs = (SEGMENTS + LAYERS // SEGMENTS) * X_BYTES
    inner = LAYERS // SEGMENTS * HIDDEN_BYTES
    assert found < LAYERS * X_BYTES, (
        f"{found:,} bytes: the inputs of all {LAYERS} layers are kept ({LAYERS * X_BYTES:,}). A"
        " jax.checkpoint around each segment keeps the inputs of segments"
    )
    assert found < inputs + inner, (
        f"{found:,} bytes: while a segment is computed again, all activations of its layers are"
        " kept. A jax.checkpoint around each layer inside it leaves their inputs"
    )


def test_matmuls_kept_are_not_computed_again(code: ModuleType) -> None:
    check_gradients(code.matmuls_kept)
    found, everything = temporary(code.matmuls_kept), temporary(plain)
    assert found < 0.9 * everything, (
        f"{found:,} bytes, as without jax.checkpoint ({everything:,}): tanh is kept as well"
    )
    counted, fewest = count_matmuls(code.matmuls_kept), count_matmuls(plain)
    assert counted == fewest, (
        f"a layer and its gradients have {counted} matmuls, where {fewest} are enough: the policy"
        " must let the results of matmuls be kept"
    )
