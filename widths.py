"""A model as it would be wider or narrower."""

import math
from fractions import Fraction
from typing import Any

from errors import UserError
from model_config import ModelConfig


def widened(model: ModelConfig, emb_dim: int) -> ModelConfig:
    """The model with another width: with as many heads more, or where muP has a base_head_dim with
    heads as many times wider; the feed-forward part grows with it.

    Raises:
        UserError: there is no such model.
    """
    times = Fraction(emb_dim, model.emb_dim)
    changes: dict[str, Any] = {"emb_dim": emb_dim}
    if model.n_layers:
        has_wider_heads = bool(model.mup and model.mup.base_head_dim)
        keys = ("head_dim",) if has_wider_heads else ("n_heads", "n_kv_heads")
        whole = {**model.model_dump(), "head_dim": model.head_width}
        given = {key: whole[key] for key in (*keys, "ffn_dim") if whole[key]}
        if uneven := [key for key, size in given.items() if (size * times).denominator != 1]:
            raise UserError(
                f"width {emb_dim}: {uneven[0]} {given[uneven[0]]} does not grow from emb_dim"
                f" {model.emb_dim} to it by a whole number; take multiples of"
                f" {_step(model, list(given.values()))}"
            )
        changes["head_dim"] = model.head_width
        changes |= {key: int(size * times) for key, size in given.items()}
    return ModelConfig.model_validate({**model.as_json(), **changes})


def _step(model: ModelConfig, sizes: list[int]) -> int:
    """The least width whose multiples all give whole sizes."""
    return math.lcm(*(Fraction(model.emb_dim, size).numerator for size in sizes))
