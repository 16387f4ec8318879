"""What docs/installation.md says: extras for GPUs and TPUs, and the precision of matmuls."""

import re
import subprocess
import tomllib

import jax
import jax.numpy as jnp
import pytest

from rungs.config import run_config
from rungs.objectives.table import make_train_step
from rungs.parallel.sharding import one_device
from rungs.step.state import AbstractState
from tests.support.committed_runs import ROOT

PACKAGES = {
    "cuda": "jax-cuda13-plugin",
    "cuda13": "jax-cuda13-plugin",
    "cuda12": "jax-cuda12-plugin",
    "tpu": "libtpu",
}
TRACKERS = ("wandb", "tensorboard", "trackio", "mlflow")
DEVICELESS = (
    *("reasoning", "verifiers", "openenv", "math", "structured", "near-duplicates", "eval"),
    *("s3", "gs"),
    *TRACKERS,
    *("search", "slurm", "ray"),
)
"""The extras that go with any other."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["uv", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_extras_of_devices_conflict_and_all_are_documented() -> None:
    extras = list(PROJECT["project"]["optional-dependencies"])
    assert extras == [*PACKAGES, *DEVICELESS]
    assert [{"extra": name} for name in PACKAGES] in PROJECT["tool"]["uv"]["conflicts"]
    page = (ROOT / "docs" / "installation.md").read_text()
    assert all(f"`{name}`" in page for name in extras)


@pytest.mark.long
@pytest.mark.parametrize("extra", ["cuda12", "tpu"])
def test_an_extra_brings_the_packages_of_its_device_alone(extra: str) -> None:
    resolved = uv("pip", "compile", "-q", "--no-annotate", "--extra", extra, "pyproject.toml")
    assert resolved.returncode == 0, resolved.stderr
    names = {line.split("==")[0] for line in resolved.stdout.splitlines()}
    assert names & set(PACKAGES.values()) == {PACKAGES[extra]}


@pytest.mark.long
def test_two_extras_are_refused() -> None:
    both = uv("sync", "--dry-run", "--extra", "cuda", "--extra", "cuda12")
    assert both.returncode != 0
    assert "incompatible" in both.stderr


def matmul_precisions() -> set[str]:
    """Return the precisions that a step in float32 requests for its matmuls."""
    settings = run_config.load_run(ROOT / "runs" / "layers")
    train = settings.train.model_copy(update={"compute_dtype": "float32"})
    abstract = AbstractState(settings._replace(train=train), 10, one_device())
    state = abstract.fill(abstract.weights, abstract.optimizer)  # type: ignore[arg-type]
    batch = jax.ShapeDtypeStruct((1, 2, 16), jnp.int32)
    program = make_train_step(train).lower(*state, batch, batch).as_text()  # type: ignore[attr-defined]
    matmuls = re.findall(r"stablehlo.dot_general.*?precision = \[(.*?)\]", program)
    assert len(matmuls) == program.count("stablehlo.dot_general") > 5
    return set(matmuls)


def test_matmuls_have_the_default_precision_unless_another_is_requested() -> None:
    assert matmul_precisions() == {"DEFAULT, DEFAULT"}
    with jax.default_matmul_precision("highest"):
        assert matmul_precisions() == {"HIGHEST, HIGHEST"}
