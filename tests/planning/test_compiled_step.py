"""A run's step compiled for devices that are not here, where their compilers are."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from rungs.common.errors import UserError
from rungs.parallel.gpu_settings import gpu_options
from rungs.planning import compiled_step
from rungs.planning.compiled_step import gpu_description, needed_bytes, torus
from rungs.planning.hardware import DEVICES, TABLE, device_by_name
from tests.support.committed_runs import ROOT


def has_compiler(name: str) -> bool:
    return compiled_step.is_installed(device_by_name(name))


NEEDS_TPU = pytest.mark.skipif(not has_compiler("tpu-v5e"), reason="libtpu is not installed")
NEEDS_CUDA = pytest.mark.skipif(not has_compiler("h100"), reason="the extra cuda is not installed")


def test_every_known_device_has_a_compiler() -> None:
    for device in DEVICES:
        of_gpu, of_tpu = {"multiprocessors", "l2_bytes", "clock_ghz"}, {"name", "dimensions"}
        known = TABLE["devices"][device.name]["compiler"].keys()
        assert known >= (of_gpu if device.platform == "gpu" else of_tpu)
        assert device.platform == "tpu" or device.compute_capability in TABLE["multiprocessors"]


@pytest.mark.parametrize(
    ("chips", "sides"), [(1, (1, 1)), (3, (2, 2)), (8, (2, 4)), (4, (1, 2, 2)), (64, (4, 4, 4))]
)
def test_torus_is_the_most_compact(chips: int, sides: tuple[int, ...]) -> None:
    assert torus(chips, len(sides)) == sides


def test_a_gpu_is_described_with_the_figures_of_the_table() -> None:
    text = gpu_description(device_by_name("rtx3090"))
    figures = dict(re.findall(r"(\w+): (\S+)", text))
    assert (figures["core_count"], figures["shared_memory_per_block_optin"]) == ("82", "101376")
    assert "cuda_compute_capability { major: 8 minor: 6 }" in " ".join(text.split())
    assert float(figures["device_memory_size"]) == round(device_by_name("rtx3090").memory_bytes)
    assert "ACCELERATED_FEATURES" not in text
    assert "ACCELERATED_FEATURES" in gpu_description(device_by_name("h100"))


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu-v5e", "^--compile: .* uv sync --extra tpu$"),
        ("h100", "^--compile: .* uv sync --extra cuda$"),
        ("mine:1e12:1e9:1e11", "^--compile: no compiler knows mine; choose from h100"),
    ],
)
def test_a_device_without_a_compiler_is_refused_in_one_line(
    device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=message):
        compiled_step.devices(device_by_name(device), 1)


def crash(*_: object) -> None:
    """What libtpu does with some programs."""
    os.abort()


def test_a_compiler_that_crashes_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_step, "compile_step", crash)
    config: Any = None
    with pytest.raises(UserError, match="--compile: the compiler for tpu-v5e crashed, "):
        compiled_step.compile_apart(config, device_by_name("tpu-v5e"))


@pytest.mark.parametrize(("platform", "needed"), [("cpu", 125), ("gpu", 125), ("tpu", 90)])
def test_a_tpu_needs_the_peak_and_others_all_temporary_arrays(platform: str, needed: int) -> None:
    sizes = {
        "argument_size_in_bytes": 40,
        "output_size_in_bytes": 35,
        "alias_size_in_bytes": 30,
        "temp_size_in_bytes": 80,
        "peak_memory_in_bytes": 90,
    }
    program = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes))
    assert needed_bytes(program, platform) == needed


def test_the_options_for_gpus_are_ones_that_xla_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parser is the same on a CPU."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    lowered: Any = jax.jit(lambda x: x + 1).lower(1.0)
    options = gpu_options(1, True)
    lowered.compile(options)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        lowered.compile({name: "none" for name in options if "_pipeline" in name})


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "plan.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "run", "sharding"),
    [
        pytest.param(*case, marks=NEEDS_TPU if case[0].startswith("tpu") else NEEDS_CUDA)
        for case in [
            ("h100", "gpt2-small", "dp:1"),
            ("a100", "gemma", "fsdp_tp:2x2"),
            ("l4", "mixtral", "fsdp:2"),
            ("tpu-v5p", "gpt2-small", "dp:1"),
            ("tpu-v5e", "gemma", "fsdp_tp:2x2"),
            ("tpu7x", "mixtral", "fsdp:2"),
        ]
    ],
)
def test_a_step_compiles_for_a_device(device: str, run: str, sharding: str) -> None:
    result = plan(f"runs/{run}", "--device", device, "--sharding", sharding, "--compile", "--json")
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    found = content["compiled"]
    size, is_tpu = found["bytes_per_device"], device.startswith("tpu")
    assert size["total"] == size["arguments"] + size["temporary"]
    if run == "gpt2-small":  # the others are so small that the compiler's own arrays matter
        assert size["estimate"] == pytest.approx(size["total"], rel=content["memory_error"])
    if run == "mixtral":
        maker = "Pallas for Mosaic" if is_tpu else "Pallas for Triton"
        assert found["kernels"]["experts"] == [maker]
    if not is_tpu and run != "gemma":
        assert found["kernels"]["attention"] == ["cuDNN"]


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
