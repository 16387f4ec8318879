"""local_gradients, accumulated_gradients, all_reduce_mean and make_data_parallel_step."""

from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from assignment.systems.given import Batch, data_mesh, summed_loss
from assignment.systems.tests import reference
from assignment.systems.tests.devices import DEVICES, EVERYWHERE, SPLIT, bytes_of, on_each, sent
from assignment.tests.mistakes import check, explained

WEIGHTS = {name: stack[0] for name, stack in reference.random_weights(1, 8, 12).items()}
BATCH = reference.random_batch([1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0], width=8)
"""Of four rows each, the devices have 4, 1, 3 and 2 that count."""
PARTS = [jax.tree.map(lambda a, i=i: a[4 * i : 4 * i + 4], BATCH) for i in range(DEVICES)]
COUNTS = [float(part.counted_B.sum()) for part in PARTS]
OWN = [reference.sums(WEIGHTS, part) for part in PARTS]
LOSS, GRADIENTS = sum(loss for loss, _ in OWN), reference.total([own for _, own in OWN])
MEANS = [reference.scaled(own, 1 / count) for (_, own), count in zip(OWN, COUNTS, strict=True)]
FORGOTTEN = (
    "no psum: what the step returns differs from device to device, so JAX refuses to call it the"
    " same everywhere. Each device would go on with weights of its own. Sum the gradients over DATA"
)

TOO_MANY_ROWS = (
    "the loss was called with more rows than a microbatch has: the activations of all microbatches"
    " are in memory together, which is what microbatches are to avoid"
)


def stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *arrays: np.stack(arrays), *trees)


def test_local_gradients_are_of_ones_own_rows(code: ModuleType) -> None:
    def local(params: Any, batch: Batch) -> Any:
        return code.local_gradients(summed_loss, params, batch)

    losses, gradients = on_each(local, EVERYWHERE, SPLIT)(WEIGHTS, BATCH)
    check(
        gradients,
        stacked([own for _, own in OWN]),
        {
            "all devices have the sum of all devices' gradients. You wrote no psum? JAX did:"
            " weights that are the same everywhere get the sum from jax.grad. Make them varying"
            " first, with jax.lax.pcast(params, DATA,"
            " to='varying')": stacked([GRADIENTS] * DEVICES),
            "the sum of all devices' gradients, once for each device: jax.grad sums over devices"
            " where weights are the same everywhere, and your psum sums these sums. Leave out the"
            " psum, and make the weights varying first, with jax.lax.pcast(params, DATA,"
            " to='varying')": stacked([reference.scaled(GRADIENTS, DEVICES)] * DEVICES),
            "these are the mean over devices: communication comes later, in all_reduce_mean": (
                stacked([reference.scaled(GRADIENTS, 1 / DEVICES)] * DEVICES)
            ),
            "divided by this device's own number of rows: the sum is asked for, as no device knows"
            " yet how many rows the others have": stacked(MEANS),
        },
    )
    check(losses, np.array([loss for loss, _ in OWN]))


def test_accumulated_gradients_are_the_sum_over_microbatches(code: ModuleType) -> None:
    shapes = []

    def loss(params: Any, batch: Batch) -> jax.Array:
        shapes.append(batch.inputs_BD.shape)
        return summed_loss(params, batch)

    def accumulated(params: Any, batch: Batch) -> Any:
        return code.accumulated_gradients(loss, params, batch, 2)

    run = on_each(accumulated, EVERYWHERE, SPLIT)
    found = run(WEIGHTS, BATCH)
    halves = [
        [
            reference.sums(WEIGHTS, jax.tree.map(lambda a, rows=rows: a[rows], part))
            for part in PARTS
        ]
        for rows in (slice(0, 2), slice(2, 4))
    ]
    losses = np.array([loss for loss, _ in OWN])
    check(
        found,
        stacked(OWN),
        {
            "only the first microbatch": stacked(halves[0]),
            "only the last microbatch: add its gradients to those before": stacked(halves[1]),
            "the loss of all microbatches, but the gradients of the last alone: add both": (
                losses,
                stacked([own for _, own in halves[1]]),
            ),
            "the gradients of all microbatches, but the loss of the last alone: add both": (
                np.array([loss for loss, _ in halves[1]]),
                stacked([own for _, own in OWN]),
            ),
            "the mean over microbatches: they may have different numbers of rows that count, so"
            " sums are added, and divided once, at the end": (
                jax.tree.map(lambda a: a / 2, stacked(OWN))
            ),
            "the sum over devices: gradients would be sent once for every microbatch. If you wrote"
            " no psum, jax.grad did; see local_gradients": (losses, stacked([GRADIENTS] * DEVICES)),
        },
    )
    assert set(shapes) == {(2, 8)}, TOO_MANY_ROWS


def test_all_reduce_mean_counts_rows_and_not_devices(code: ModuleType) -> None:
    def mean(summed: Any, counted: Any) -> Any:
        return code.all_reduce_mean(jax.tree.map(lambda a: a[0], summed), counted)

    found = on_each(mean, SPLIT, SPLIT)(stacked(OWN), BATCH.counted_B)
    whole = (LOSS, GRADIENTS)
    of_means = (
        sum(loss / count for (loss, _), count in zip(OWN, COUNTS, strict=True)),
        reference.total(MEANS),
    )

    def everywhere(tree: Any, factor: float) -> Any:
        return jax.tree.map(lambda a: np.stack([np.asarray(a) * factor] * DEVICES), tree)

    check(
        found,
        everywhere(whole, 1 / sum(COUNTS)),
        {
            "the sum over devices, not divided by the number of rows that count": (
                everywhere(whole, 1)
            ),
            "divided by the number of devices, or of rows on one: not of rows that count": (
                everywhere(whole, 1 / DEVICES)
            ),
            "divided by all rows, also those that do not count": (
                everywhere(whole, 1 / len(BATCH.counted_B))
            ),
            "the mean of the devices' means: a row on a device where few count would weigh more"
            " than one where many do. Sum losses and numbers of rows separately, then divide": (
                everywhere(of_means, 1 / DEVICES)
            ),
            "the sum of the devices' means: dividing comes after the sum, once": (
                everywhere(of_means, 1)
            ),
            "divided twice: by the rows of one device before the sum, and by all of them after": (
                everywhere(of_means, 1 / sum(COUNTS))
            ),
            "nothing is summed: each device has the mean of its own rows": stacked(
                [
                    jax.tree.map(lambda a, n=count: np.asarray(a) / n, own)
                    for own, count in zip(OWN, COUNTS, strict=True)
                ]
            ),
            "each device divides the sum of all by its own number of rows: sum the numbers, too": (
                stacked([jax.tree.map(lambda a, n=n: np.asarray(a) / n, whole) for n in COUNTS])
            ),
        },
    )


@pytest.mark.parametrize("microbatches", [1, 2])
def test_data_parallel_training_is_that_of_one_device(code: ModuleType, microbatches: int) -> None:
    step = code.make_data_parallel_step(summed_loss, data_mesh(DEVICES), microbatches)
    zeros, n = reference.zeros(WEIGHTS), sum(COUNTS)
    with explained({"out_specs": FORGOTTEN}):
        params, moments, loss = step(WEIGHTS, zeros, BATCH)
    assert float(loss) == pytest.approx(LOSS / n, rel=1e-5), "the loss is the mean over all rows"

    def after(gradients: Any, factor: float) -> Any:
        return reference.updated(WEIGHTS, zeros, reference.scaled(gradients, factor))

    check(
        (params, moments),
        reference.trained(WEIGHTS, BATCH, 1),
        {
            f"the gradient is {DEVICES} times too large: summed twice, once by you and once by"
            " jax.grad, which sums what belongs to weights that are the same everywhere. (Adam"
            " would hide this, SGD doesn't)": after(GRADIENTS, DEVICES / n),
            "the gradient is summed but not divided": after(GRADIENTS, 1),
            f"the gradient is {DEVICES} times too small: divided by all rows that count, and then"
            " once more by the number of devices, as pmean does": (
                after(GRADIENTS, 1 / n / DEVICES)
            ),
            "the weights are those of the first device, which learned from its own rows only: no"
            " psum, and with check_vma=False JAX doesn't notice": after(MEANS[0], 1),
            "the mean of the devices' means: see all_reduce_mean": (
                after(reference.total(MEANS), 1 / DEVICES)
            ),
        },
    )
    check(step(params, moments, BATCH)[:2], reference.trained(WEIGHTS, BATCH, 2))


def test_data_parallel_gradients_are_sent_once(code: ModuleType) -> None:
    shapes = []

    def loss(params: Any, batch: Batch) -> jax.Array:
        shapes.append(batch.inputs_BD.shape)
        return summed_loss(params, batch)

    step = code.make_data_parallel_step(loss, data_mesh(DEVICES), 4)
    found = sent(step, WEIGHTS, reference.zeros(WEIGHTS), BATCH)
    assert set(shapes) == {(1, 8)}, TOO_MANY_ROWS
    assert set(found) == {"all-reduce"}, found
    times = found["all-reduce"] / bytes_of(WEIGHTS)
    assert times < 1.5, (
        f"{times:.0f} times the bytes of the gradients are all-reduced. For four microbatches, sum"
        " on each device first, and over devices once"
    )
