"""Which length is computed, and whether with gradients. Axes as in `rungs/step/shortcuts.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec

from rungs.parallel.sharding import DATA
from rungs.step.objective import Aux, Microbatch
from rungs.step.shortcuts import Shortcuts, at_shortest_length
from tests.support.configs import mesh_of

LENGTHS = [3, 4, 8]
KEY = jax.random.key(0)


def targets(*last: int) -> Array:
    """Return rows of targets that count up to these places, but for some before."""
    rows = np.full((len(last), 8), -1)
    for row, place in zip(rows, last, strict=True):
        row[max(place - 2, 0) : place] = 5
    return jnp.array(rows)


def shape_of(*arrays_BS: Array) -> Array:
    return jnp.array([array.shape[1] for array in arrays_BS])


@pytest.mark.parametrize(
    ("last", "length"),
    [((0, 0), 3), ((2, 1), 3), ((1, 3), 3), ((4, 0), 4), ((5, 1), 8), ((8, 8), 8)],
)
def test_the_shortest_length_with_all_targets_is_computed(
    last: tuple[int, ...], length: int
) -> None:
    inputs, extras = jnp.zeros((2, 8)), jnp.ones((2, 8))
    lengths = at_shortest_length(shape_of, LENGTHS, inputs, targets(*last), extras)
    assert lengths.tolist() == [length] * 3


def test_all_devices_compute_the_longest_of_their_lengths() -> None:
    def on_each_device(targets_BS: Array) -> Array:
        return at_shortest_length(shape_of, LENGTHS, targets_BS, targets_BS)[None]

    rows = PartitionSpec(DATA)
    step = jax.shard_map(on_each_device, mesh=mesh_of(4), in_specs=rows, out_specs=rows)
    assert jax.jit(step)(targets(1, 2, 4, 0)).tolist() == [[4, 4]] * 4


@pytest.mark.parametrize(("weights", "taken"), [((0, 0, 0, 0), 0), ((0, 0, 2, 0), 1)])
def test_gradients_are_computed_if_any_device_has_a_weight(
    weights: tuple[int, ...], taken: int
) -> None:
    shortcuts = Shortcuts(LENGTHS, lambda _inputs, _targets, weights_BS: (weights_BS != 0).any())

    def evaluate(weight: Array, microbatch: Microbatch) -> tuple[Array, Aux]:
        loss = (weight * microbatch.arrays[2]).sum() + 1.0
        return loss, Aux(loss, None)

    def on_each_device(targets_BS: Array, weights_BS: Array) -> Array:
        microbatch = Microbatch((targets_BS, targets_BS, weights_BS), jnp.arange(1), KEY)
        differentiate = shortcuts.around(always_one, evaluate)
        weight = jax.lax.pcast(jnp.ones(1), DATA, to="varying")
        return differentiate(weight, microbatch)[1]

    def always_one(weight: Array, microbatch: Microbatch) -> tuple[tuple[Array, Aux], Array]:
        return evaluate(weight, microbatch), jnp.ones_like(weight)

    rows = PartitionSpec(DATA)
    step = jax.shard_map(on_each_device, mesh=mesh_of(4), in_specs=rows, out_specs=rows)
    weights_BS = jnp.tile(jnp.array(weights)[:, None], 8)
    assert jax.jit(step)(targets(8, 8, 8, 8), weights_BS).tolist() == [taken] * 4
