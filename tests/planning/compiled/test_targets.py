"""Devices that are not here, and a run's step compiled for them where their compilers are."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from rungs.common.errors import UserError
from rungs.planning.compiled import targets
from rungs.planning.hardware import DEVICES, TABLE, device_by_name
from tests.support.committed_runs import ROOT


def has_compiler(name: str) -> bool:
    return targets.is_installed(device_by_name(name))


NEEDS_TPU = pytest.mark.skipif(not has_compiler("tpu-v5e"), reason="libtpu is not installed")
NEEDS_CUDA = pytest.mark.skipif(not has_compiler("h100"), reason="the extra cuda is not installed")


def test_every_known_device_has_a_compiler() -> None:
    for device in DEVICES:
        of_gpu, of_tpu = {"multiprocessors", "l2_bytes", "clock_ghz"}, {"name", "dimensions"}
        known = TABLE["devices"][device.name]["compiler"].keys()
        assert known >= (of_gpu if device.platform == "gpu" else of_tpu)
        assert device.platform == "tpu" or device.compute_capability in TABLE["multiprocessors"]


@pytest.mark.parametrize(
    ("chips", "dimensions", "sides"),
    [
        (1, 2, (1, 1)),
        (2, 2, (1, 2)),
        (3, 2, (2, 2)),
        (8, 2, (2, 4)),
        (256, 2, (16, 16)),
        (4, 3, (1, 2, 2)),
        (8, 3, (2, 2, 2)),
        (64, 3, (4, 4, 4)),
    ],
)
def test_torus_is_the_most_compact(chips: int, dimensions: int, sides: tuple[int, ...]) -> None:
    assert targets.torus(chips, dimensions) == sides


def test_a_gpu_is_described_with_the_figures_of_the_table() -> None:
    text = targets.gpu_description(device_by_name("rtx3090"))
    figures = dict(re.findall(r"(\w+): (\S+)", text))
    assert figures["core_count"] == "82"
    assert figures["shared_memory_per_block_optin"] == "101376"
    assert "cuda_compute_capability { major: 8 minor: 6 }" in " ".join(text.split())
    assert float(figures["device_memory_size"]) == round(device_by_name("rtx3090").memory_bytes)
    assert "feature_extension" not in text
    assert "ACCELERATED_FEATURES" in targets.gpu_description(device_by_name("h100"))


def test_a_device_without_a_compiler_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"^--compile: .* uv sync --extra tpu$"):
        targets.devices(device_by_name("tpu-v5e"), 1)
    with pytest.raises(UserError, match=r"^--compile: .* uv sync --extra cuda$"):
        targets.devices(device_by_name("h100"), 1)
    with pytest.raises(UserError, match=r"^--compile: no compiler knows mine; choose from h100"):
        targets.devices(device_by_name("mine:1e12:1e9:1e11"), 1)


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "plan.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def compiled(device: str, sharding: str, run: str = "mixtral") -> dict[str, Any]:
    result = plan(f"runs/{run}", "--device", device, "--sharding", sharding, "--compile", "--json")
    assert result.returncode == 0, result.stderr
    content: dict[str, Any] = json.loads(result.stdout)["compiled"]
    return content


def check_arguments_and_collectives(found: dict[str, Any]) -> None:
    size = found["bytes_per_device"]
    assert size["total"] == size["arguments"] + size["temporary"]
    assert not found["uncounted"]
    assert {"all-gather", "reduce-scatter"} <= {sent["kind"] for sent in found["collectives"]}


@pytest.mark.long
@NEEDS_CUDA
@pytest.mark.parametrize("device", ["h100", "h200", "b200", "a100", "l4", "rtx3090", "rtx4090"])
def test_a_step_compiles_for_gpus(device: str) -> None:
    found = compiled(device, "fsdp:2")
    check_arguments_and_collectives(found)
    assert found["kernels"] == {
        "attention": ["cuDNN"],
        "experts": ["Pallas for Triton"],
        "loss": ["XLA"],
    }
    assert found["spilled_kernels"] == []


@pytest.mark.long
@NEEDS_TPU
@pytest.mark.parametrize("device", ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu7x"])
def test_a_step_compiles_for_tpus(device: str) -> None:
    found = compiled(device, "fsdp:2")
    check_arguments_and_collectives(found)
    assert found["kernels"]["experts"] == ["Pallas for Mosaic"]


@pytest.mark.long
@NEEDS_TPU
def test_a_step_that_does_not_fit_is_reported_with_the_compilers_reason(tmp_path: Path) -> None:
    for name in ("model.json", "train.json"):
        (tmp_path / name).write_bytes((ROOT / "runs/layers" / name).read_bytes())
    train = json.loads((tmp_path / "train.json").read_bytes())
    train |= {"microbatch_size": 65_536, "min_train_tokens": 2_000_000, "remat": "none"}
    (tmp_path / "train.json").write_text(json.dumps(train))
    no_datasets = ("--datasets-dir", str(tmp_path / "datasets"))
    result = plan(str(tmp_path), "--device", "tpu-v5e", "--compile", *no_datasets)
    assert result.returncode == 1
    assert re.search(r"the compiler says: Ran out of memory", result.stdout)
    assert "It does not fit into memory:" in result.stdout


def test_the_options_for_gpus_are_ones_that_xla_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parser is the same on a CPU."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    lowered: Any = jax.jit(lambda x: x + 1).lower(1.0)
    options = targets.options("gpu", microbatches=1, float8=True)
    assert len(options) == len(targets.options("gpu", microbatches=1)) + 1
    lowered.compile(options)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        lowered.compile({name: "none" for name in options if "_pipeline" in name})
