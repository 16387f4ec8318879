"""The dtype a run computes in, and the loss scale of float16."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungs.common import machine
from rungs.common.errors import UserError
from rungs.config import run_config
from rungs.optim import precision
from rungs.optim.precision import FIRST_SCALE, STEPS_UNTIL_LARGER, LossScale
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.step import train_step
from rungs.training import start as start_module
from rungs.training.dataset_learner import on_datasets
from tests.support.tiny_run import change, final_arrays, last_checkpoint, make_dataset, make_run

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture
def datasets(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "datasets")
    return tmp_path / "datasets"


def go(run: RunFolder, datasets: Path, **start: Any) -> int:
    return start_module.launch(
        run, run_config.load_run(run.path), StartOptions(**start), on_datasets(datasets)
    )


def chosen(monkeypatch: pytest.MonkeyPatch, **device: Any) -> str:
    """The honest choice for a device; conftest has another."""
    module = importlib.util.module_from_spec(precision.__spec__)
    precision.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(**device)])
    if "cpu_info" in device:
        monkeypatch.setattr(machine, "_CPU_INFO", device["cpu_info"])
    return str(module.fastest_dtype())


@pytest.mark.parametrize(
    ("vendor", "flags", "dtype"),
    [
        ("AuthenticAMD", "fpu avx512f avx512_bf16 sse", "bfloat16"),
        ("GenuineIntel", "fpu avx512f avx512_bf16 amx_bf16 amx_tile", "bfloat16"),
        ("GenuineIntel", "fpu avx512f avx512_bf16 sse", "float32"),
        ("AuthenticAMD", "fpu avx512f avx2", "float32"),
        ("", "", "float32"),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_that_is_faster(
    vendor: str, flags: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    if vendor:
        core = f"vendor_id\t: {vendor}\nmodel\t\t: 1\nflags\t\t: {flags}\n"
        info.write_text("\n".join([core, core]))
    assert chosen(monkeypatch, platform="cpu", cpu_info=info) == dtype


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ({"platform": "tpu"}, "bfloat16"),
        ({"platform": "gpu", "compute_capability": "9.0"}, "bfloat16"),
        ({"platform": "gpu", "compute_capability": "12.0"}, "bfloat16"),
        ({"platform": "gpu", "compute_capability": "7.5"}, "float16"),
        ({"platform": "gpu", "compute_capability": "6.1"}, "float32"),
        ({"platform": "gpu", "compute_capability": "gfx90a"}, "float32"),
        ({"platform": "other"}, "float32"),
    ],
)
def test_an_accelerator_computes_in_its_fastest_dtype(
    device: dict[str, str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(monkeypatch, **device) == dtype


@pytest.mark.long
def test_the_chosen_dtype_is_recorded_and_kept(
    tmp_path: Path, datasets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", compute_dtype="auto", min_train_tokens=6 * 128)
    monkeypatch.setattr(precision, "fastest_dtype", lambda: "bfloat16")
    assert go(run, datasets) == 0
    assert last_checkpoint(run).meta.train["compute_dtype"] == "bfloat16"
    monkeypatch.setattr(precision, "fastest_dtype", lambda: "float32")
    change(run, min_train_tokens=8 * 128)
    assert go(run, datasets, extend=True) == 0
    assert last_checkpoint(run).meta.train["compute_dtype"] == "bfloat16"
    change(run, compute_dtype="float32", min_train_tokens=10 * 128)
    with pytest.raises(UserError, match="compute_dtype"):
        go(run, datasets, extend=True)


@pytest.mark.long
def test_every_dtype_learns_like_float32(tmp_path: Path, datasets: Path) -> None:
    losses, norms = {}, {}
    for dtype in DTYPES:
        run = make_run(tmp_path / dtype, compute_dtype=dtype, drop_rate=0.0)
        assert go(run, datasets) == 0
        steps = metrics.read(run.metrics)
        losses[dtype] = np.array([step.train_loss for step in steps])
        norms[dtype] = np.array([step.gradient_norm for step in steps])
        assert {step.loss_scale for step in steps} == {FIRST_SCALE if dtype == "float16" else None}
        assert not any(step.dropped_microbatches for step in steps)
    for dtype, limit in (("bfloat16", 2e-2), ("float16", 4e-3)):
        np.testing.assert_allclose(losses[dtype], losses["float32"], rtol=limit)
        np.testing.assert_allclose(norms[dtype], norms["float32"], rtol=10 * limit)
        assert (losses[dtype] != losses["float32"]).any()


@pytest.mark.long
def test_an_overflow_halves_the_loss_scale_and_is_not_a_failed_step(
    tmp_path: Path, datasets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**40)
    keys = {"compute_dtype": "float16", "max_non_finite_steps": 2, "keep_checkpoints": -1}
    whole, cut = make_run(tmp_path / "whole", **keys), make_run(tmp_path / "cut", **keys)
    assert go(whole, datasets) == 0
    scales = [step.loss_scale for step in metrics.read(whole.metrics)]
    assert scales[:3] == [2.0**40, 2.0**39, 2.0**38]
    assert 1 < scales[-1] < 2.0**40  # type: ignore[operator]
    assert scales[-1] == scales[-2]
    assert not any(step.dropped_microbatches for step in metrics.read(whole.metrics))
    assert all(step.train_loss for step in metrics.read(whole.metrics))
    assert not (whole.path / "failed-steps").exists()
    assert go(cut, datasets) == 0
    assert go(cut, datasets, rewind_to="step-000005") == 0
    one, other = final_arrays(cut), final_arrays(whole)
    assert any("loss_scale" in name for name in one)
    assert all(one[name].tobytes() == other[name].tobytes() for name in other)


def test_a_nonfinite_loss_is_reported_at_any_loss_scale() -> None:
    nothing = np.float32(0)
    result = train_step.StepResult(
        np.array([1.0, np.nan]),  # type: ignore[arg-type]
        np.array([1.0, 1.0]),  # type: ignore[arg-type]
        np.array([3, 0]),  # type: ignore[arg-type]
        *(nothing, nothing, np.float32(1), nothing, None),  # type: ignore[arg-type]
        np.float32(8),  # type: ignore[arg-type]
    )
    assert result.nonfinite(["the loss", "a", "b", "c"]) == {1: "the loss"}
    assert result.loss == 1.0
    assert result.trained_loss is None
    unscaled = result._replace(loss_scale=np.float32(1))  # type: ignore[arg-type]
    assert unscaled.nonfinite(["the loss", "a", "b", "c"]) == {0: "c", 1: "the loss"}


def test_the_loss_scale_doubles_after_many_steps_without_an_overflow() -> None:
    scale = LossScale()
    scale.steps.set_value(jnp.int32(STEPS_UNTIL_LARGER - 2))
    scale.adapt(jnp.asarray(False))
    assert scale.scale[...] == FIRST_SCALE
    scale.adapt(jnp.asarray(False))
    assert scale.scale[...] == 2 * FIRST_SCALE
    assert scale.steps[...] == 0
    scale.adapt(jnp.asarray(True))
    assert scale.scale[...] == FIRST_SCALE
