"""What JAX makes of a function, before it is compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

UNROLLED = (
    "a Python loop over layers makes one long program, whose parts the compiler may put in any"
    " order: nothing says how many layers are in memory at a time. jax.lax.scan makes it a loop"
)


def equations(function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Return the operations of a function, also those in loops and kernels, each once."""

    def inside(jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from inside(inner)

    return inside(jax.make_jaxpr(function)(*arguments).jaxpr)


def count(function: Callable[..., Any], primitive: str, *arguments: Any) -> int:
    """Return how often an operation stands in a function."""
    return sum(one.primitive.name == primitive for one in equations(function, *arguments))
