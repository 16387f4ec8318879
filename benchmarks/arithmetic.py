"""Arithmetic of a model by formula."""

import math

from model_config import ModelConfig
from state import shapes_of


def flops_per_token(model: ModelConfig) -> int:
    """Forwards and backwards, in sequences of `context_length`: 6 for each weight in a product
    (Kaplan et al. 2020, section 2.1), and 12 · L · N · H · S for attention, which is all of the
    square S · S, as it is computed."""
    sizes = {weight: math.prod(shape) for weight, shape in shapes_of(model).items()}
    in_products = sum(sizes.values()) - sizes.get("position_embedding.embedding", 0)
    if not model.tied_embeddings:
        in_products -= sizes["token_embedding.embedding"]
    heads_width = (model.n_heads or 0) * model.head_width if model.n_layers else 0
    return 6 * in_products + 12 * model.n_layers * heads_width * model.context_length
