"""Devices by name, by description, and by what JAX calls them."""

import subprocess
import sys

import jax.numpy as jnp
import pytest

from rungs.common import machine
from rungs.common.errors import UserError
from rungs.parallel import gpu_settings
from rungs.planning import hardware
from rungs.planning.hardware import NAMES, device_by_name, device_of_kind
from tests.support.committed_runs import ROOT


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3060", "rtx3060"),
        ("NVIDIA GeForce RTX 3060 Ti", None),
        ("Tesla T4", "t4"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L4", "l4"),
        ("TPU v4", "tpu-v4"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU7x", "tpu7x"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5e", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v5p", "tpu-v5p"),
        # slower models with similar names, and unknown ones
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("TPU v5x", None),
        ("cpu", None),
    ],
)
def test_device_of_a_jax_kind(kind: str, name: str | None) -> None:
    found = device_of_kind(kind)
    assert (found and found.name) == name


def test_the_help_of_the_command_names_every_device_without_loading_jax() -> None:
    script = "import sys; from rungs.cli import plan; plan.main(['--help'], standalone_mode=False)"
    command = [sys.executable, "-c", f"{script}; print('jax' in sys.modules)"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    text = " ".join(shown.split())
    assert f"One of {', '.join(NAMES)};" in text
    assert text.endswith("False")


def test_float32_is_slower_on_tensor_cores() -> None:
    h100, v5e = device_by_name("h100"), device_by_name("tpu-v5e")
    assert h100.peak(jnp.dtype("bfloat16")) == h100.peak(jnp.dtype("float16")) == 989.4e12
    assert h100.peak(jnp.dtype("float32")) == 494.7e12
    assert v5e.peak(jnp.dtype("float32")) == v5e.peak(jnp.dtype("bfloat16")) == 197e12


def test_memory_is_what_a_device_reports_not_what_it_is_called() -> None:
    reported = {  # by openxla/xla's target_config, PyTorch and libtpu
        "h100": 84_942_979_072,
        "h200": 150.1e9,
        "a100": 85_100_068_864,
        "rtx3090": 25.44e9,
        "rtx4090": 25.38e9,
        "tpu-v5e": 16.91e9,
        "tpu-v5p": 102.8e9,
    }
    for name, size in reported.items():
        assert device_by_name(name).memory_bytes == pytest.approx(size, rel=1e-3)


def test_jax_preallocates_a_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_settings, "memory_share", lambda: 0.6)
    h100, tpu = device_by_name("h100"), device_by_name("tpu-v5p")
    assert h100.usable_bytes == 0.6 * h100.memory_bytes
    assert tpu.usable_bytes == tpu.memory_bytes


def test_a_cpu_has_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.memory_bytes() > 0
    monkeypatch.setattr(machine, "memory_bytes", lambda: 7e9)
    cpu = device_by_name("cpu")
    assert cpu.usable_bytes == 7e9
    assert cpu.peak(jnp.dtype("float32")) is None
    assert hardware.this_device() == cpu


def test_a_device_can_be_described() -> None:
    mine = device_by_name("mine:300e12:48e9:0.9e12")
    assert (mine.name, mine.memory_bytes, mine.bandwidth) == ("mine", 48e9, 0.9e12)
    assert mine.peak(jnp.dtype("bfloat16")) == mine.peak(jnp.dtype("float32")) == 300e12
    assert mine.usable_bytes == 48e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "h101",
            "choose from h100, h200, b200, a100, l4, rtx3090, .*, tpu7x, cpu, or",
        ),
        ("mine:1:2", "not NAME:FLOPS:BYTES:BANDWIDTH"),
        ("mine:1:2:fast", "not NAME:FLOPS:BYTES:BANDWIDTH"),
        ("mine:1:2:0", "needs a name and three numbers of at least 1"),
        ("mine:nan:2:3", "needs a name and three numbers of at least 1"),
        (":1:2:3", "needs a name and three numbers of at least 1"),
    ],
)
def test_an_unknown_device_is_rejected(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        device_by_name(text)
