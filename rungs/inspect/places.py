"""Named places of a model, and the module that reads or changes what passes there. Layers and heads
are counted from 0. Axes as in `rungs/model/gpt.py`.

    layer 3 residual      the output of the block, x_BSD
    layer 3 attention     what attention adds to its input, y_BSD, after its output norm if any
    layer 3 head 2        what a head returns, before the output projection: y_BSH
    layer 3 feed-forward  what the feed-forward layer adds to its input, y_BSD, likewise"""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.model.blocks import Block, Passed

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
        Slot(inner, f"{name}_output_norm" if has_norm else name).hook(change)
    return block
