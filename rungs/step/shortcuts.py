"""Leave out what a microbatch doesn't need: padding, and gradients if no token has a weight.

A program has fixed shapes, so it contains the computation for each of a few lengths, with and
without gradients; which one runs depends on the texts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from rungs.parallel import collectives
from rungs.parallel.mesh import DATA
from rungs.step.objective import Aux, Microbatch

T = TypeVar("T")


class Shortcuts(NamedTuple):
    """What the microbatches of a step may be computed without."""

    lengths: Sequence[int]
    """See `at_shortest_length`."""
    has_gradient: Callable[..., Array]
    """From this device's rows of a microbatch to whether its gradient can be other than 0."""

    def around(
        self,
        differentiate: Callable[..., tuple[tuple[Array, Aux], Any]],
        evaluate: Callable[..., tuple[Array, Aux]],
    ) -> Callable[[Any, Microbatch], tuple[tuple[Array, Aux], Any]]:
        """Return `differentiate` with shortcuts: microbatches without a gradient are only
        evaluated, and all are cut as `at_shortest_length` does.

        Args:
            differentiate: `jax.value_and_grad` of `evaluate`.
            evaluate: from weights and a microbatch to a loss and an aux whose outputs have a fixed
                shape.
        """

        def shortened(weights: Any, microbatch: Microbatch) -> tuple[tuple[Array, Aux], Any]:
            def with_gradient(*arrays: Array) -> tuple[Any, Aux]:
                (_, aux), gradient = differentiate(weights, microbatch._replace(arrays=arrays))
                return gradient, aux

            def without_gradient(*arrays: Array) -> tuple[Any, Aux]:
                _, aux = evaluate(weights, microbatch._replace(arrays=arrays))
                return zeros, aux

            def either(*arrays: Array) -> tuple[Any, Aux]:
                return jax.lax.cond(is_needed, with_gradient, without_gradient, *arrays)

            zeros = jax.tree.map(jnp.zeros_like, weights)
            has_gradient = self.has_gradient(*microbatch.arrays).astype(jnp.int32)
            is_needed = collectives.pmax(has_gradient, DATA) > 0
            gradient, aux = at_shortest_length(either, self.lengths, *microbatch.arrays)
            return (aux.loss, aux), gradient

        return shortened


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

    return jax.lax.switch(choice, [at(length) for length in lengths], *arrays_BS)
