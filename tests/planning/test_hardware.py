"""Devices by name, by description, and as JAX calls them."""

import jax.numpy as jnp
import pytest

from rungs.common.errors import UserError
from rungs.parallel import devices
from rungs.planning import hardware
from rungs.planning.hardware import KNOWN, SHARE_VARIABLES, named, of_kind


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5e", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v5p", "tpu-v5p"),
        # slower ones of nearly the same name, and those nobody knows
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("TPU v5x", None),
        ("cpu", None),
    ],
)
def test_it_is_known_by_what_jax_calls_it(kind: str, name: str | None) -> None:
    found = of_kind(kind)
    assert (found and found.name) == name


def test_every_kind_is_found_by_its_name() -> None:
    assert [named(one.name) for one in KNOWN] == list(KNOWN)
    assert {one.name for one in KNOWN} == {
        *("h100", "h200", "a100", "rtx3090", "rtx4090", "tpu-v5e", "tpu-v5p")
    }


def test_wider_numbers_are_multiplied_slower_where_there_are_units_for_the_narrow_ones() -> None:
    h100, v5e = named("h100"), named("tpu-v5e")
    assert h100.peak(jnp.dtype("bfloat16")) == h100.peak(jnp.dtype("float16")) == 989.4e12
    assert h100.peak(jnp.dtype("float32")) == 494.7e12
    assert v5e.peak(jnp.dtype("float32")) == v5e.peak(jnp.dtype("bfloat16")) == 197e12


def test_of_a_gpu_jax_takes_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SHARE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert named("h100").usable_bytes == 60e9
    assert named("tpu-v5p").usable_bytes == 95e9
    for name, share, usable in zip(SHARE_VARIABLES[::-1], (".9", "0.5"), (72e9, 40e9), strict=True):
        monkeypatch.setenv(name, share)  # the newer name goes before the other
        assert named("h100").usable_bytes == pytest.approx(usable)
    for none in ("0", "nan", "-1", "half"):
        monkeypatch.setenv(SHARE_VARIABLES[0], none)
        assert named("h100").usable_bytes == 60e9


def test_a_processor_has_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 7e9)
    cpu = named("cpu")
    assert cpu.usable_bytes == 7e9
    assert cpu.peak(jnp.dtype("float32")) is None
    assert hardware.at_hand() == cpu
    assert devices.memory_bytes() > 0


def test_any_other_can_be_described() -> None:
    mine = named("mine:300e12:48e9:0.9e12")
    assert (mine.name, mine.memory_bytes, mine.bandwidth) == ("mine", 48e9, 0.9e12)
    assert mine.peak(jnp.dtype("bfloat16")) == mine.peak(jnp.dtype("float32")) == 300e12
    assert mine.usable_bytes == 48e9


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("h101", "none of h100, h200, a100, rtx3090, rtx4090, tpu-v5e, tpu-v5p, cpu; or"),
        ("mine:1:2", "not NAME:FLOPS:BYTES:BANDWIDTH"),
        ("mine:1:2:3:4", "not NAME:FLOPS:BYTES:BANDWIDTH"),
        ("mine:1:2:fast", "not NAME:FLOPS:BYTES:BANDWIDTH"),
        ("mine:1:2:0", "a name and figures from 1 on"),
        ("mine:1:-2:3", "a name and figures from 1 on"),
        ("mine:nan:2:3", "a name and figures from 1 on"),
        ("mine:1:inf:3", "a name and figures from 1 on"),
        (":1:2:3", "a name and figures from 1 on"),
    ],
)
def test_what_is_none_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told.replace("(", r"\(")):
        named(text)
