"""Eight virtual CPU devices, and compiled code kept between runs of the tests."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from rungs.optim import precision
from rungs.parallel import jax_setup

jax.config.update("jax_num_cpu_devices", 8)
jax_setup.enable_compilation_cache()
assert jax.device_count() == 8
precision.fastest_dtype = lambda: "float32"  # on every machine alike


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
