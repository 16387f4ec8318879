"""`rungs.patch`: change activations of a model, for ablation and activation patching. A `Hooked`
module reads or changes what passes at a named place. Layers and heads are counted from 0, axes are
those of `rungs/model/gpt.py`.

    layer 3 residual      the output of the block, x_BSD
    layer 3 attention     what attention adds to its input, y_BSD, after its output norm if any
    layer 3 head 2        what a head returns, before the output projection: y_BSH
    layer 3 feed-forward  what the feed-forward layer adds to its input, y_BSD, likewise"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig
from rungs.model.blocks import Block, Passed
from rungs.model.gpt import GPT

Change = Callable[[Array], Array | np.ndarray]
"""From an activation to the one in its place."""
Part = Literal["residual", "attention", "heads", "feed-forward"]
_NAME = re.compile(r"layer (\d+) (?:(residual|attention|feed-forward)|head (\d+))", re.ASCII)


class Place(NamedTuple):
    """A named place."""

    layer: int
    part: Part
    head: int | None
    """The head, if the part is "heads"."""

    @classmethod
    def find(cls, name: str, config: ModelConfig) -> Self:
        """Return the place with this name. Raises ValueError, which lists the places, if the model
        has none of that name."""
        if found := _NAME.fullmatch(name):
            layer, named, head = found.groups()
            part: Part = named or "heads"  # type: ignore[assignment]
            place = cls(int(layer), part, int(head) if head else None)
            if place._is_in(config):
                return place
        raise ValueError(f'"{name}": no such place; {_places(config)}')

    def _is_in(self, config: ModelConfig) -> bool:
        if self.part == "feed-forward" and config.feed_forward == "none":
            return False
        return self.layer < config.n_layers and (self.head or 0) < (config.n_heads or 1)


def _places(config: ModelConfig) -> str:
    """Return the places of a model, for a message."""
    if not config.n_layers:
        return "the model has no layers"
    parts = ["residual", "attention", "feed-forward"][: 2 + (config.feed_forward != "none")]
    names = ", ".join(f'"layer N {part}"' for part in parts)
    last_layer, last_head = config.n_layers - 1, (config.n_heads or 1) - 1
    return (
        f'the model has {names} and "layer N head M", for N from 0 to {last_layer} and M from 0'
        f" to {last_head}"
    )


class Hooked(nnx.Module):
    """Another module, whose input or output passes through a function."""

    def __init__(self, module: Any, change: Change, *, of_input: bool = False) -> None:
        self.module, self.change, self.of_input = module, change, of_input

    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Of several results, the first is the activation."""
        if self.of_input:
            return self.module(self.change(x), *args, **kwargs)
        result = self.module(x, *args, **kwargs)
        if not isinstance(result, tuple):
            return self.change(result)
        changed = self.change(result[0])
        if isinstance(result, Passed):
            return result._replace(x_BSD=jnp.asarray(changed))
        return changed, *result[1:]


class Slot(NamedTuple):
    """An attribute that holds a module."""

    owner: Any
    name: str

    @property
    def module(self) -> Any:
        return getattr(self.owner, self.name)

    @property
    def innermost(self) -> "Slot":
        """The attribute of the innermost `Hooked` that holds the module itself."""
        return Slot(self.module, "module").innermost if isinstance(self.module, Hooked) else self

    def hook(self, change: Change, *, of_input: bool = False) -> None:
        """Let a function change what passes. It is called after those of before: nearer to the
        module for its input, farther for its output."""
        slot = self.innermost if of_input else self
        setattr(slot.owner, slot.name, Hooked(slot.module, change, of_input=of_input))


def unhooked(module: Any) -> Any:
    """Return the module inside of all hooks."""
    return unhooked(module.module) if isinstance(module, Hooked) else module


def hook(block: Any, part: Part, change: Change) -> Any:
    """Let a function change an activation of a block or of the stacked blocks: for "heads" those of
    all heads, y_BSNH. The block is changed; use what is returned instead of it."""
    inner: Block = unhooked(block)
    if part == "residual":
        return Hooked(block, change)
    if part == "heads":
        Slot(unhooked(inner.attention), "output").hook(change, of_input=True)
    else:
        name = part.replace("-", "_")
        has_norm = getattr(inner, f"{name}_output_norm") is not None
        own = part if part == "attention" else feed_forward_name(inner) or ""
        Slot(inner, f"{name}_output_norm" if has_norm else own).hook(change)
    return block


def feed_forward_name(block: Block) -> str | None:
    """Return which attribute of a block is its feed-forward layer, None without one."""
    names = "feed_forward", "dense_feed_forward"
    return next((name for name in names if getattr(block, name) is not None), None)


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
        functions: by the name of a place, as above: from its activation,
            x_BSD, or y_BSH for a head, to another of the same shape. They are traced by JAX, and
            where layers share code, computed for each of them.

    Raises:
        ValueError: there is no such place, or a function returns another shape.
        UserError: the model has delta_net layers."""
    refuse_delta_net("patch", model.config)
    if model.config.n_dense_layers:
        raise UserError("patch: not for a model with n_dense_layers, whose blocks differ")
    patched: GPT = nnx.merge(*nnx.split(model))
    by_part: dict[Part, list[tuple[int, Change]]] = defaultdict(list)
    for name, function in functions.items():
        place = Place.find(name, model.config)
        change = _checked(name, function)
        by_part[place.part].append((place.layer, _of_heads(place.head, change)))
    for part, of_layers in by_part.items():
        patched.blocks = hook(patched.blocks, part, ByLayer(of_layers, model.config.n_layers))
    return patched


def refuse_delta_net(what: str, config: ModelConfig) -> None:
    """Raise UserError if a model has layers without attention, for which places have no meaning."""
    if config.delta_net:
        raise UserError(
            f"{what}: not for a model with delta_net layers, which have no attention weights"
        )


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
