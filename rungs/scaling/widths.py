"""The same model at other widths."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig


def with_width(model: ModelConfig, emb_dim: int) -> ModelConfig:
    """Return the model at another width. Raises UserError if it cannot have that width."""
    return with_keys(model, keys_for_width(model, emb_dim))


def with_keys(model: ModelConfig, keys: Mapping[str, Any]) -> ModelConfig:
    """Return the model with its width and other keys changed. Raises UserError on conflicts."""
    try:
        return ModelConfig.model_validate({**model.as_json(), **keys})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"width {keys['emb_dim']}: {reason}") from None


def keys_for_width(model: ModelConfig, emb_dim: int) -> dict[str, Any]:
    """Return the keys of `model.json` for another width. The number of heads, or the head size if
    muP has a base_head_dim, grows with it, and ffn_dim. Raises UserError if that is impossible."""
    factor = Fraction(emb_dim, model.emb_dim)
    sizes = _sizes_that_grow(model)
    if uneven := [key for key, size in sizes.items() if (size * factor).denominator != 1]:
        raise UserError(
            f"width {emb_dim}: {uneven[0]} {sizes[uneven[0]]} would not be a whole number when"
            f" emb_dim goes from {model.emb_dim} to {emb_dim}; use multiples of"
            f" {smallest_width(model)}"
        )
    same_heads = {"head_dim": model.head_width} if model.n_layers else {}
    grown = {key: int(size * factor) for key, size in sizes.items()}
    return {"emb_dim": emb_dim, **same_heads, **grown}


def smallest_width(model: ModelConfig) -> int:
    """Return the smallest width whose multiples all give whole sizes."""
    sizes = _sizes_that_grow(model)
    width = math.lcm(*(Fraction(model.emb_dim, size).numerator for size in sizes.values()))
    head = sizes.get("head_dim", 0) * width // model.emb_dim
    return 2 * width if head % 2 else width  # rotary positions need an even head_dim


def _sizes_that_grow(model: ModelConfig) -> dict[str, int]:
    if not model.n_layers:
        return {}
    if model.mup and model.mup.base_head_dim:
        sizes = {"head_dim": model.head_width, "ffn_dim": model.ffn_dim}
    else:
        sizes = {
            "n_heads": model.n_heads,
            "n_kv_heads": model.n_kv_heads,
            "ffn_dim": model.ffn_dim,
        }
    return {key: size for key, size in sizes.items() if size}
