"""A model as it would be wider or narrower."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig


def widened(model: ModelConfig, emb_dim: int) -> ModelConfig:
    """The model with another width, as `changes`."""
    return changed(model, changes(model, emb_dim))


def changed(model: ModelConfig, keys: Mapping[str, Any]) -> ModelConfig:
    """The model with other keys, its width among them.

    Raises:
        UserError: there is no such model.
    """
    try:
        return ModelConfig.model_validate({**model.as_json(), **keys})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"width {keys['emb_dim']}: {reason}") from None


def changes(model: ModelConfig, emb_dim: int) -> dict[str, Any]:
    """The keys that give a model another width: it has as many heads more, or where muP has a
    base_head_dim heads as many times wider; the feed-forward part grows with it.

    Raises:
        UserError: there is no such model.
    """
    times = Fraction(emb_dim, model.emb_dim)
    sizes = _sizes(model)
    if uneven := [key for key, size in sizes.items() if (size * times).denominator != 1]:
        raise UserError(
            f"width {emb_dim}: {uneven[0]} {sizes[uneven[0]]} does not grow from emb_dim"
            f" {model.emb_dim} to it by a whole number; take multiples of {step(model)}"
        )
    same_heads = {"head_dim": model.head_width} if model.n_layers else {}
    grown = {key: int(size * times) for key, size in sizes.items()}
    return {"emb_dim": emb_dim, **same_heads, **grown}


def step(model: ModelConfig) -> int:
    """The least width whose multiples all give whole sizes."""
    sizes = _sizes(model)
    width = math.lcm(*(Fraction(model.emb_dim, size).numerator for size in sizes.values()))
    head = sizes.get("head_dim", 0) * width // model.emb_dim
    return 2 * width if head % 2 else width  # rotary positions turn pairs


def _sizes(model: ModelConfig) -> dict[str, int]:
    """What grows with the width, as it is."""
    if not model.n_layers:
        return {}
    if model.mup and model.mup.base_head_dim:
        return _given(head_dim=model.head_width, ffn_dim=model.ffn_dim)
    return _given(n_heads=model.n_heads, n_kv_heads=model.n_kv_heads, ffn_dim=model.ffn_dim)


def _given(**sizes: int | None) -> dict[str, int]:
    return {key: size for key, size in sizes.items() if size}
