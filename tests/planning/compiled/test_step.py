"""What a compiled program needs of a device's memory; a compiler that crashes."""

import os
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax
from jax.sharding import SingleDeviceSharding

from rungs.common.errors import UserError
from rungs.planning.compiled import step, targets
from rungs.planning.compiled.step import needed_bytes
from rungs.planning.hardware import device_by_name

V5E = device_by_name("tpu-v5e")
MIB = 2**20
targets.prepare()


def crash(*_: object) -> None:
    """What libtpu does with some programs."""
    os.abort()


def test_a_compiler_that_crashes_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "compile_step", crash)
    config: Any = None
    with pytest.raises(UserError, match=r"--compile: the compiler for tpu-v5e crashed, .*\(jax "):
        step.compile_apart(config, V5E)


def program(arguments: int, results: int, aliased: int, temporary: int, peak: int) -> Any:
    sizes = {
        "argument_size_in_bytes": arguments,
        "output_size_in_bytes": results,
        "alias_size_in_bytes": aliased,
        "temp_size_in_bytes": temporary,
        "peak_memory_in_bytes": peak,
    }
    return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes))


@pytest.mark.parametrize(("platform", "needed"), [("cpu", 125), ("gpu", 125), ("tpu", 90)])
def test_a_tpu_needs_the_peak_and_others_all_temporary_arrays(platform: str, needed: int) -> None:
    compiled = program(arguments=40, results=35, aliased=30, temporary=80, peak=90)
    assert needed_bytes(compiled, platform) == needed


def layers(weights: Array, x: Array) -> Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].astype(jnp.float32).sum()


@pytest.mark.long
@pytest.mark.skipif(not targets.is_installed(V5E), reason="libtpu is not installed")
def test_a_tpus_compiler_refuses_a_peak_above_its_memory_not_a_larger_sum_of_arrays() -> None:
    place = SingleDeviceSharding(targets.devices(V5E, 1)[0])
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
        for shape in ((4, 256, 256), (2**19, 256))
    ]
    lowered = jax.jit(jax.grad(layers)).lower(*shapes)

    def compiled_for(memory_bytes: float) -> Any:
        return lowered.compile({"xla_tpu_max_hbm_size_mib": str(int(memory_bytes / MIB))})

    compiled = compiled_for(V5E.memory_bytes)
    peak, allocated = needed_bytes(compiled, "tpu"), needed_bytes(compiled, "gpu")
    assert allocated > 1.05 * peak
    assert needed_bytes(compiled_for(1.005 * peak), "tpu") == peak
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory on HBM"):
        compiled_for(0.995 * peak)
