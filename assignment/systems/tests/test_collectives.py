"""reduce_scatter, all_gather, all_reduce, bytes_sent and make_zero_step."""

from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from assignment.systems.given import data_mesh, summed_loss
from assignment.systems.tests import reference
from assignment.systems.tests.devices import DEVICES, SPLIT, bytes_of, on_each, sent
from assignment.tests.mistakes import check, explained

X = np.random.default_rng(2).normal(size=(DEVICES, 2 * DEVICES, 3)).astype(np.float32)
"""An array (2 N, 3) for each device."""
SUM = X.astype(np.float64).sum(axis=0)
WEIGHTS = {name: stack[0] for name, stack in reference.random_weights(1, 8, 12).items()}
BATCH = reference.random_batch([1, 1, 0, 1, 1, 0, 1, 0], width=8)


def run(function: Any, x: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the results of a function of one array on each device, and the bytes that a device
    sent to its neighbour."""
    compiled = on_each(lambda x: function(x[0]), SPLIT)
    found = sent(compiled, x)
    bytes_to_next = found.pop("collective-permute", 0)
    assert not found, (
        f"the compiler found {', '.join(found)}: here it is to be written with jax.lax.ppermute, a"
        " send to a neighbour"
    )
    return np.asarray(compiled(x)), bytes_to_next


def check_bytes(found: int, parts: int) -> None:
    part = X[0].nbytes // DEVICES
    assert found > 0, "nothing is sent"
    assert found == parts * part, (
        f"each device sends {found / part:g} parts of the array, where {parts} are enough: one part"
        " at a time, and only as often as needed. Sending whole arrays around the ring costs N"
        " times as much"
    )


def test_reduce_scatter_gives_each_device_its_part_of_the_sum(code: ModuleType) -> None:
    parts = SUM.reshape(DEVICES, 2, 3)
    found, sent_bytes = run(code.reduce_scatter, X)
    of_itself = np.stack([X[i, 2 * i : 2 * i + 2] for i in range(DEVICES)])
    misplaced = (
        "device i has part i {} 1: begin with the part of another device, so that after N - 1"
    )
    misplaced += " sends the sum that arrives is that of one's own part"
    check(
        found,
        parts,
        {
            misplaced.format("+"): np.roll(parts, -1, axis=0),
            misplaced.format("-"): np.roll(parts, 1, axis=0),
            "its own numbers, without those of the others": of_itself,
            "the mean, not the sum": parts / DEVICES,
            "every device has the whole sum: that is an all-reduce": np.stack([SUM] * DEVICES),
        },
    )
    check_bytes(sent_bytes, DEVICES - 1)


def test_all_gather_gives_everyone_all_parts_in_order(code: ModuleType) -> None:
    parts = X[:, :2]
    found, sent_bytes = run(code.all_gather, parts)
    in_order_of_arrival = [[parts[(i - hop) % 4] for hop in range(4)] for i in range(4)]
    check(
        found,
        np.stack([parts.reshape(-1, 3)] * DEVICES),
        {
            "stacked: the parts are to be joined along their first axis": (
                np.stack([parts] * DEVICES)
            ),
            "each device has the parts in the order in which they arrived, its own first: what"
            " arrives after h sends is the part of device (own - h) % N": (
                np.array(in_order_of_arrival).reshape(DEVICES, -1, 3)
            ),
        },
    )
    check_bytes(sent_bytes, DEVICES - 1)


def test_all_reduce_is_both_after_each_other(code: ModuleType) -> None:
    found, sent_bytes = run(code.all_reduce, X)
    check(found, np.stack([SUM] * DEVICES))
    check_bytes(sent_bytes, 2 * (DEVICES - 1))


@pytest.mark.parametrize(
    ("collective", "times"), [("reduce-scatter", 1), ("all-gather", 1), ("all-reduce", 2)]
)
def test_bytes_sent_in_a_ring(code: ModuleType, collective: str, times: int) -> None:
    expected = times * 800 * 7 / 8
    check(
        code.bytes_sent(collective, 800, 8),
        expected,
        {
            "one part is never sent, as it is where it belongs: N - 1 sends, not N": times * 800,
            "N times too much: each send is a part of the array, not all of it; and asked for is"
            " what one device sends, not what all do": 8 * expected,
            "an all-reduce is a reduce-scatter and then an all-gather, twice as much as each": (
                expected / 2 if times == 2 else expected * 2
            ),
        },
    )


def after(gradients: Any, factor: float) -> Any:
    gradients = reference.scaled(gradients, factor)
    return reference.updated(WEIGHTS, reference.zeros(WEIGHTS), gradients)


def test_zero_training_is_that_of_one_device(code: ModuleType) -> None:
    mesh = data_mesh(DEVICES)
    zeros = jax.device_put(reference.zeros(WEIGHTS), NamedSharding(mesh, SPLIT))
    step = code.make_zero_step(summed_loss, mesh)
    why = (
        "JAX can't see that weights which were gathered are the same on all devices: with"
        " check_vma=False, jax.shard_map believes out_specs. (If they were not gathered, they"
        " aren't)"
    )
    with explained({"out_specs": why}):
        params, moments, loss = step(WEIGHTS, zeros, BATCH)
    n = float(BATCH.counted_B.sum())
    expected_loss, gradients = reference.sums(WEIGHTS, BATCH)
    assert params["up"].shape == WEIGHTS["up"].shape, (
        f"up comes back with the shape {params['up'].shape}: each device returns only the part that"
        " it updated. Gather them"
    )
    first = reference.sums(WEIGHTS, jax.tree.map(lambda a: a[:2], BATCH))[1]
    check(
        params,
        reference.trained(WEIGHTS, BATCH, 1)[0],
        {
            "the gradient is summed but not divided by the number of rows that count": (
                after(gradients, 1)[0]
            ),
            "divided by the number of devices, not of rows that count": (
                after(gradients, 1 / DEVICES)[0]
            ),
            "divided twice: by the number of rows and by that of devices": (
                after(gradients, 1 / n / DEVICES)[0]
            ),
            "only the first device's gradients": after(first, 1 / n)[0],
        },
    )
    assert float(loss) == pytest.approx(expected_loss / n, rel=1e-5)
    for name, moment in moments.items():
        shape = moment.addressable_shards[0].data.shape
        assert shape[0] == WEIGHTS[name].shape[0] // DEVICES, (
            f"each device has {shape} of the moments of {name}, whose whole shape is"
            f" {moment.shape}: the point is that it keeps only its part of them"
        )
    check(step(params, moments, BATCH)[:2], reference.trained(WEIGHTS, BATCH, 2))


def test_zero_sends_no_more_than_an_all_reduce(code: ModuleType) -> None:
    mesh = data_mesh(DEVICES)
    zeros = jax.device_put(reference.zeros(WEIGHTS), NamedSharding(mesh, SPLIT))
    found = sent(code.make_zero_step(summed_loss, mesh), WEIGHTS, zeros, BATCH)
    whole = bytes_of(WEIGHTS)
    assert found["all-reduce"] < whole / 2, (
        "gradients are all-reduced: every device gets the sums of all of them and uses 1 / N."
        " Reduce-scatter them, and gather weights"
    )
    part = whole / DEVICES
    own_ring = 2 * (DEVICES - 1) * part
    library = found["reduce-scatter"] + found["all-gather"]
    assert found["collective-permute"] + library <= own_ring + part, (
        f"{dict(found)}: more than gradients once and weights once, of {whole} bytes"
    )
