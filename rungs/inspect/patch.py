"""Change activations of a model, for ablation and activation patching."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.inspect.places import Change, Part, Place, hook
from rungs.model.gpt import GPT


class ByLayer(nnx.Module):
    """Functions for layers that share their code. Stacked like the blocks, so that each layer has
    its number."""

    def __init__(self, functions: Sequence[tuple[int, Change]], layers: int) -> None:
        self.functions = tuple(functions)
        self.layer = nnx.Variable(jnp.arange(layers), axes=(), inputs=0)

    def __call__(self, x: Array) -> Array:
        """Return x after the functions of this layer."""
        for layer, function in self.functions:
            x = jnp.where(self.layer[...] == layer, function(x), x)
        return x


def patch(model: GPT, functions: Mapping[str, Change]) -> GPT:
    """Return a model with the weights of `model`, whose activations pass through functions. It is
    used like any model, also by `rungs.look` and `rungs.Generator`, and can be patched again; the
    given one is unchanged.

        ablated = rungs.patch(model, {"layer 1 head 3": jnp.zeros_like})
        clean = rungs.look(model, clean_tokens_BS)
        restored = rungs.patch(model, {"layer 2 residual": lambda _: clean.at("layer 2 residual")})

    Args:
        functions: by the name of a place, as in `rungs/inspect/places.py`: from its activation,
            x_BSD, or y_BSH for a head, to another of the same shape. They are traced by JAX, and
            where layers share code, computed for each of them.

    Raises:
        ValueError: there is no such place, or a function returns another shape."""
    patched: GPT = nnx.merge(*nnx.split(model))
    by_part: dict[Part, list[tuple[int, Change]]] = defaultdict(list)
    for name, function in functions.items():
        place = Place.find(name, model.config)
        change = _checked(name, function)
        by_part[place.part].append((place.layer, _of_heads(place.head, change)))
    for part, of_layers in by_part.items():
        patched.blocks = hook(patched.blocks, part, ByLayer(of_layers, model.config.n_layers))
    return patched


def _of_heads(head: int | None, change: Change) -> Change:
    """Return a function of all heads, y_BSNH, that changes one; `change` itself for None."""
    if head is None:
        return change
    return lambda y_BSNH: y_BSNH.at[:, :, head].set(change(y_BSNH[:, :, head]))


def _checked(name: str, function: Change) -> Change:
    """Return the function in the dtype of its activation. It raises ValueError for another
    shape."""

    def change(x: Array) -> Array:
        changed = jnp.asarray(function(x), x.dtype)
        if changed.shape != x.shape:
            raise ValueError(
                f'"{name}": the function returns shape {changed.shape} for an activation of shape'
                f" {x.shape}"
            )
        return changed

    return change
