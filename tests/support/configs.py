"""Tiny configs and meshes that many tests share."""

import jax
from jax.sharding import Mesh

from rungs.config.model_config import ModelConfig
from rungs.config.sharding_config import mesh_axes
from rungs.config.train_config import TrainConfig
from rungs.parallel.sharding import create_mesh

ONE_FILE = 2**40
"""A file size that no tiny model's weights reach."""


def model_config(**changes: object) -> ModelConfig:
    """Return a tiny GPT-2 with some keys changed."""
    tiny = {"vocab_size": 32, "context_length": 8, "emb_dim": 16, "n_layers": 2, "n_heads": 2}
    return ModelConfig.model_validate({**tiny, **changes})


def train_config(**changes: object) -> TrainConfig:
    """Return the config of a small training with some keys changed."""
    small = {
        "dataset": "none",
        "microbatch_size": 4,
        "learning_rate": 0.01,
        "checkpoint_interval": 10,
    }
    return TrainConfig.model_validate({**small, **changes})


def mesh_of(data: int, last: int = 1, mode: str = "dp") -> Mesh:
    """Return a mesh of the first devices for a mode: data × tensor or, in cp, data × context."""
    return create_mesh((data, last), mesh_axes(mode), jax.devices()[: data * last])
