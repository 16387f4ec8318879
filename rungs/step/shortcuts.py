"""Skip the padding of a microbatch, and its backward pass if no token has a weight. A program has
fixed shapes, so it contains the computation for a few lengths, with and without gradients, and
chooses one at run time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from rungs.parallel import collectives
from rungs.parallel.sharding import DATA
from rungs.step.objective import Aux, Microbatch

T = TypeVar("T")


class Shortcuts(NamedTuple):
    """Which parts of a microbatch's computation may be skipped."""

    lengths: Sequence[int]
    """Lengths to cut to; see `at_shortest_length`."""
    has_gradient: Callable[..., Array]
    """From this device's rows of a microbatch to whether its gradient may be other than 0."""

    def around(
        self,
        differentiate: Callable[..., tuple[tuple[Array, Aux], Any]],
        evaluate: Callable[..., tuple[Array, Aux]],
    ) -> Callable[[Any, Microbatch], tuple[tuple[Array, Aux], Any]]:
        """Return `differentiate` with shortcuts: microbatches without a gradient are only
        evaluated, and all are cut by `at_shortest_length`.

        Args:
            differentiate: `jax.value_and_grad` of `evaluate`.
            evaluate: from weights and a microbatch to a loss and an aux of fixed shapes."""

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
    """Return compute(*arrays_BS), with S cut to the shortest length, the same on all devices, that
    includes all counted targets.

    Args:
        compute: returns arrays whose shapes don't depend on S.
        lengths: ascending; the last is S.
        arrays_BS: inputs, targets, negative where a target doesn't count, and others."""
    places_S = jnp.arange(1, lengths[-1] + 1)
    used = jnp.where(arrays_BS[1] >= 0, places_S, 0).max()
    choice = jnp.searchsorted(jnp.array(lengths), collectives.pmax(used, DATA))

    def at(length: int) -> Callable[..., T]:
        return lambda *arrays: compute(*(array[:, :length] for array in arrays))

    return jax.lax.switch(choice, [at(length) for length in lengths], *arrays_BS)
