"""Leave out what a microbatch doesn't need: padding, and gradients if no token has a weight.

A program has fixed shapes, so it contains the computation for each of a few lengths, with and
without gradients; which one runs depends on the texts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from rungs.parallel import collectives
from rungs.parallel.names import DATA

T = TypeVar("T")


class Shortcuts(NamedTuple):
    """What the microbatches of a step may be computed without."""

    lengths: Sequence[int]
    """See `at_shortest_length`."""
    has_gradient: Callable[..., Array]
    """From this device's rows of a microbatch to whether its gradient can be other than 0."""


def at_shortest_length(compute: Callable[..., T], lengths: Sequence[int], *arrays_BS: Array) -> T:
    """Return compute(*arrays_BS), with S cut to the shortest length that has all targets that
    count; all devices choose the same.

    Args:
        compute: returns arrays whose shapes don't depend on S.
        lengths: ascending; the last is S.
        arrays_BS: inputs, targets, negative where one does not count, and others.
    """
    places_S = jnp.arange(1, lengths[-1] + 1)
    used = jnp.where(arrays_BS[1] >= 0, places_S, 0).max()
    choice = jnp.searchsorted(jnp.array(lengths), collectives.pmax(used, DATA))

    def at(length: int) -> Callable[..., T]:
        return lambda *arrays: compute(*(array[:, :length] for array in arrays))

    result: T = jax.lax.switch(choice, [at(length) for length in lengths], *arrays_BS)
    return result


def take_shortcuts(
    shortcuts: Shortcuts,
    with_gradient: Callable[..., T],
    without_gradient: Callable[..., T],
    *arrays_BS: Array,
) -> T:
    """Return with_gradient(*arrays_BS) or, if the gradient is 0, without_gradient(*arrays_BS), as
    `at_shortest_length` does."""
    has_gradient = shortcuts.has_gradient(*arrays_BS).astype(jnp.int32)
    is_needed = collectives.pmax(has_gradient, DATA) > 0

    def compute(*arrays_BS: Array) -> T:
        result: T = jax.lax.cond(is_needed, with_gradient, without_gradient, *arrays_BS)
        return result

    return at_shortest_length(compute, shortcuts.lengths, *arrays_BS)
