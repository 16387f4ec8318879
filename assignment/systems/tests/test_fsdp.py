"""split, gather, forward and make_fsdp_step."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from assignment.systems.given import DATA, data_mesh
from assignment.systems.tests import reference
from assignment.systems.tests.devices import DEVICES, SPLIT, bytes_of, memory, on_each, sent
from assignment.systems.tests.equations import UNROLLED, count
from assignment.tests.mistakes import check, explained

WEIGHTS = reference.random_weights(3, 8, 12)
BATCH = reference.random_batch([1, 1, 0, 1, 1, 0, 1, 0], width=8)
PARTS = PartitionSpec(None, DATA)


def test_split_gives_each_device_a_part_of_every_layer(code: ModuleType) -> None:
    found = code.split(WEIGHTS, data_mesh(DEVICES))
    check(found, WEIGHTS)
    for name, stack in found.items():
        layers, rows, columns = stack.shape
        shape = stack.addressable_shards[0].data.shape
        assert len(stack.addressable_shards) == DEVICES, f"{name} is on one device only"
        assert shape != stack.shape, f"each device has all of {name}"
        assert shape[0] == layers, (
            f"each device has {shape} of {name}: some layers whole. Split the matrices, along the"
            " second axis of the stack, so that all devices work on all layers"
        )
        assert shape == (layers, rows // DEVICES, columns), (
            f"each device has {shape} of {name} {stack.shape}: split the second axis"
        )


def test_gather_joins_parts_and_sums_their_gradients(code: ModuleType) -> None:
    whole = {name: stack[0] for name, stack in WEIGHTS.items()}
    factors = np.random.default_rng(3).normal(size=(DEVICES, 8, 12)).astype(np.float32)

    def along_the_last_axis(matrix: np.ndarray) -> np.ndarray:
        return np.concatenate(np.split(matrix, DEVICES), axis=1)

    def everywhere(change: Callable[[np.ndarray], np.ndarray]) -> Any:
        return {name: np.stack([change(matrix)] * DEVICES) for name, matrix in whole.items()}

    check(
        on_each(code.gather, SPLIT)(whole),
        everywhere(np.asarray),
        {
            "parts are stacked, not joined: with tiled=True they are one matrix": (
                everywhere(lambda matrix: np.stack(np.split(matrix, DEVICES)))
            ),
            "parts are rows of the matrix: join them along axis 0": everywhere(along_the_last_axis),
        },
    )

    def weighted(parts: Any, factor: Any) -> jax.Array:
        return jnp.sum(code.gather(parts)["up"] * factor[0])

    gradient = on_each(jax.grad(weighted), SPLIT, SPLIT)(whole, factors)["up"]
    own = np.stack([np.split(factors[i], DEVICES)[i] for i in range(DEVICES)])
    summed = factors.astype(np.float64).sum(axis=0).reshape(DEVICES, 2, 12)
    check(
        gradient,
        summed,
        {
            "the gradient of a part is only what this device's own rows say about it: the others'"
            " must be added, which the derivative of jax.lax.all_gather does by itself": own,
            "the mean over devices, not the sum": summed / DEVICES,
            f"the sum of gradients {DEVICES} times": summed * DEVICES,
        },
    )


def test_fsdp_forward_is_that_of_all_layers(code: ModuleType) -> None:
    run = on_each(code.forward, PARTS, SPLIT)
    found = run(code.split(WEIGHTS, data_mesh(DEVICES)), BATCH.inputs_BD)
    expected = reference.outputs(WEIGHTS, BATCH.inputs_BD)
    check(found.reshape(expected.shape), expected)


def test_fsdp_forward_needs_no_more_than_some_layers(code: ModuleType) -> None:
    n_layers = 24
    weights = reference.random_weights(n_layers, 32, 64)
    one = bytes_of(weights) / n_layers

    def loss(parts: Any, x_BD: Any) -> jax.Array:
        return code.forward(parts, x_BD).sum()

    x_BD, run = np.zeros((DEVICES, 32), np.float32), on_each(loss, PARTS, SPLIT)
    assert count(run, "dot_general", weights, x_BD) == 2, UNROLLED
    forward = memory(run, weights, x_BD) / one
    assert forward < n_layers / 2, (
        f"the forward pass needs memory for {forward:.0f} of {n_layers} layers' whole weights."
        " Gather a layer's inside the loop over layers, not all before it"
    )
    backward = memory(on_each(jax.grad(loss), PARTS, SPLIT), weights, x_BD) / one
    assert backward < n_layers / 2, (
        f"with its gradient it needs memory for {backward:.0f} of {n_layers} layers' whole weights:"
        " what the forward pass gathered is kept for the backward pass. jax.checkpoint around a"
        " layer that gathers its weights makes it gather them again"
    )


def test_fsdp_training_is_that_of_one_device(code: ModuleType) -> None:
    mesh = data_mesh(DEVICES)
    step = code.make_fsdp_step(mesh)
    zeros, n = reference.zeros(WEIGHTS), float(BATCH.counted_B.sum())
    forgotten = (
        "the loss that is returned is each device's own: sum it over DATA before dividing, so that"
        " it is the same everywhere"
    )
    with explained({"out_specs": forgotten}):
        params, moments, loss = step(code.split(WEIGHTS, mesh), code.split(zeros, mesh), BATCH)
    expected_loss, gradients = reference.sums(WEIGHTS, BATCH)

    def after(gradients: Any, factor: float) -> Any:
        return reference.updated(WEIGHTS, zeros, reference.scaled(gradients, factor))

    mixed = {
        name: np.tile(sum(np.split(gradient, DEVICES, axis=1)), (1, DEVICES, 1))
        for name, gradient in gradients.items()
    }
    mistake = (
        "gradients of {} over devices once more: each device has those of its own part, already"
    )
    mistake += " summed by the derivative of gather, and the others' are of other weights"
    check(
        (params, moments),
        reference.trained(WEIGHTS, BATCH, 1),
        {
            mistake.format("parts are summed"): after(mixed, 1 / n),
            mistake.format("parts are averaged"): after(mixed, 1 / n / DEVICES),
            "summed but not divided by the number of rows that count": after(gradients, 1),
            "divided by the number of devices, not of rows that count": (
                after(gradients, 1 / DEVICES)
            ),
            "divided twice: by the number of rows and by that of devices": (
                after(gradients, 1 / n / DEVICES)
            ),
            f"gradients are {DEVICES} times too large: of the loss after its psum, with"
            " check_vma=False. Differentiate the device's own loss": after(gradients, DEVICES / n),
        },
    )
    assert float(loss) == pytest.approx(expected_loss / n, rel=1e-5)
    assert params["up"].addressable_shards[0].data.shape == (3, 2, 12), "weights stay split"
    check(step(params, moments, BATCH)[:2], reference.trained(WEIGHTS, BATCH, 2))
    found = sent(step, params, moments, BATCH)
    assert found["all-reduce"] < bytes_of(WEIGHTS) / DEVICES, (
        "gradients are all-reduced, where a reduce-scatter is enough: each device needs its part"
    )
