"""Eight virtual CPU devices, and compiled code kept between runs of the tests."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jax.sharding import Mesh

import precision
import runtime
from model_config import ModelConfig
from sharding import create_mesh
from train_config import TrainConfig

jax.config.update("jax_num_cpu_devices", 8)
runtime.cache_compiled_code()
assert jax.device_count() == 8
precision.fastest_dtype = lambda: "float32"  # on every machine alike

ONE_FILE = 2**40
"""A limit that no tiny model's weights reach."""


def model_config(**changes: object) -> ModelConfig:
    """A tiny GPT-2, with keys changed."""
    tiny = {"vocab_size": 32, "context_length": 8, "emb_dim": 16, "n_layers": 2, "n_heads": 2}
    return ModelConfig.model_validate({**tiny, **changes})


def train_config(**changes: object) -> TrainConfig:
    """A small training, with keys changed."""
    small = {
        "dataset": "none",
        "microbatch_size": 4,
        "learning_rate": 0.01,
        "checkpoint_interval": 10,
    }
    return TrainConfig.model_validate({**small, **changes})


def mesh_of(data: int, tensor: int = 1) -> Mesh:
    """A mesh of the first devices."""
    return create_mesh((data, tensor), devices=jax.devices()[: data * tensor])


def pytest_configure(config: pytest.Config) -> None:
    """Leave the long tests out of a plain `pytest`; `pytest tests/faults` and any other choice of
    tests runs all that it names."""
    config.addinivalue_line("markers", "long: left out of a plain `pytest`")
    is_plain = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_plain and not config.option.markexpr:
        config.option.markexpr = "not long"


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
