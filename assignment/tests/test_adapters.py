"""adapters.py, as a plugin of pytest in a folder whose tests are like those of JAX-LM."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
THEIRS = """
from jax_impl.distributed import model

import numpy as np

from . import adapters
from .adapters import run_softmax


def test_softmax():
    assert np.allclose(run_softmax(np.zeros((2, 4), np.float32), 1), 0.25)


def test_sharding():
    mesh = adapters.get_mesh([8, 1], ["data", "tensor"])
    assert mesh.devices.size == 8
    assert model.get_sharding_config_for_mode("dp")
"""


def test_their_tests_call_the_chosen_author(tmp_path: Path) -> None:
    tests = tmp_path / "jax_tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "adapters.py").write_text("raise AssertionError('theirs')")
    (tests / "test_sharding.py").write_text(THEIRS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "assignment.adapters", "jax_tests"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AUTHOR": "solution"}
    environment.pop("XLA_FLAGS", None)
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "2 passed" in ended.stdout, ended.stdout + ended.stderr
