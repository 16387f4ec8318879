"""Bytes that instructions move, against XLA's count on a CPU, and by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

from rungs.planning.compiled.hlo import Module, device_bytes_of
from rungs.planning.compiled.work import moved_bytes

FLOAT = 4
TABLE, ROWS = (
    jax.ShapeDtypeStruct((1000, 16), jnp.float32),
    jax.ShapeDtypeStruct((2, 16), "float32"),
)
INDEX = jax.ShapeDtypeStruct((), jnp.int32)


def moved(program: Any) -> int:
    module = Module.parse(program)
    return sum(map(moved_bytes, module.computations[module.entry]))


def compiled(function: Callable[..., Array], *shapes: Any, donated: Any = ()) -> Any:
    return jax.jit(function, donate_argnums=donated).lower(*shapes).compile()


@pytest.mark.parametrize(
    ("function", "shapes", "size"),
    [
        (lambda x, y: x @ y.T, (TABLE, ROWS), (16_000 + 32 + 2_000) * FLOAT),
        (lambda x, y: jnp.tanh(x) * y + 1, (ROWS, ROWS), 3 * 32 * FLOAT),
        (
            lambda x, i: jnp.tanh(lax.dynamic_slice_in_dim(x, i, 2)),
            (TABLE, INDEX),
            2 * 32 * FLOAT + 4,
        ),
        (
            lambda x, y, i: lax.dynamic_update_slice_in_dim(x, jnp.tanh(y), i, 0),
            (TABLE, ROWS, INDEX),
            2 * 32 * FLOAT + 4,
        ),
    ],
    ids=["matmul", "fusion", "slice", "update in place"],
)
def test_bytes_are_those_that_xla_counts(
    function: Callable[..., Array], shapes: tuple[Any, ...], size: int
) -> None:
    donated = (0,) if len(shapes) == 3 else ()
    program = compiled(function, *shapes, donated=donated)
    assert moved(program) == size == program.cost_analysis()["bytes accessed"]


def test_a_lookup_reads_the_rows_that_it_takes() -> None:
    indices = jax.ShapeDtypeStruct((3,), jnp.int32)
    program = compiled(lambda table, i: table[i], TABLE, indices)
    assert moved(program) == 3 * 4 + 2 * 3 * 16 * FLOAT


def test_a_table_that_is_cleared_in_a_fusion_is_written_whole_and_one_that_is_given_is_not() -> (
    None
):
    fused = """
%fused (p0: f32[1000,16], p1: s32[3,1], p2: f32[3,16]) -> f32[1000,16] {
  %p0 = f32[1000,16]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %zeros = f32[1000,16]{1,0} broadcast(%zero), dimensions={}
  %p1 = s32[3,1]{1,0} parameter(1)
  %p2 = f32[3,16]{1,0} parameter(2)
  ROOT %s = f32[1000,16]{1,0} scatter(%TABLE, %p1, %p2), to_apply=%add
}
ENTRY %main {
  %a = f32[1000,16]{1,0} parameter(0)
  %i = s32[3,1]{1,0} parameter(1)
  %x = f32[3,16]{1,0} parameter(2)
  ROOT %f = f32[1000,16]{1,0} fusion(%a, %i, %x), kind=kLoop, calls=%fused
}
"""
    rows, indices = 3 * 16 * FLOAT, 12
    assert moved(fused.replace("%TABLE", "%p0")) == 3 * rows + indices
    assert moved(fused.replace("%TABLE", "%zeros")) == rows + indices + 16_000 * FLOAT


def test_a_fusion_writes_each_of_its_results_and_reads_an_operand_once() -> None:
    text = """
%inner (q: f32[8,16]) -> f32[16] {
  %q = f32[8,16]{1,0} parameter(0)
  ROOT %row = f32[1,16]{1,0} slice(%q), slice={[0:1], [0:16]}
}
%fused (p0: f32[5,8,16], p1: s32[], p2: f32[8,16]) -> (f32[5,8,16], f32[16]) {
  %p0 = f32[5,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[8,16]{1,0} parameter(2)
  %b = f32[1,8,16]{2,1,0} bitcast(%p2)
  %z = s32[] constant(0)
  %u = f32[5,8,16]{2,1,0} dynamic-update-slice(%p0, %b, %p1, %z, %z)
  %n = f32[1,16]{1,0} fusion(%p2), kind=kLoop, calls=%inner
  ROOT %t = (f32[5,8,16]{2,1,0}, f32[1,16]{1,0}) tuple(%u, %n)
}
ENTRY %main {
  %a = f32[5,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[8,16]{1,0} parameter(2)
  %f = (f32[5,8,16]{2,1,0}, f32[1,16]{1,0}) fusion(%a, %i, %x), kind=kLoop, calls=%fused
  %g = f32[1,16]{1,0} get-tuple-element(%f), index=1
  ROOT %h = f32[16]{0} bitcast(%g)
}
"""
    index, update, row = 4, 8 * 16 * FLOAT, 16 * FLOAT
    assert moved(text) == index + update + (update + row)


def test_rows_are_read_through_elementwise_operations() -> None:
    text = """
%fused (p0: f32[1000,16], p1: s32[3,1], p2: pred[1000,16], p3: f32[1000,16]) -> f32[3,16] {
  %p0 = f32[1000,16]{1,0} parameter(0)
  %p1 = s32[3,1]{1,0} parameter(1)
  %p2 = pred[1000,16]{1,0} parameter(2)
  %p3 = f32[1000,16]{1,0} parameter(3)
  %masked = f32[1000,16]{1,0} select(%p2, %p0, %p3)
  %narrow = bf16[1000,16]{1,0} convert(%masked)
  ROOT %rows = bf16[3,16]{1,0} gather(%narrow, %p1), slice_sizes={1,16}
}
ENTRY %main {
  %a = f32[1000,16]{1,0} parameter(0)
  %i = s32[3,1]{1,0} parameter(1)
  %m = pred[1000,16]{1,0} parameter(2)
  %b = f32[1000,16]{1,0} parameter(3)
  ROOT %f = bf16[3,16]{1,0} fusion(%a, %i, %m, %b), kind=kLoop, calls=%fused
}
"""
    elements, indices = 3 * 16, 12
    assert moved(text) == elements * (FLOAT + 1 + FLOAT) + indices + elements * 2


def test_a_copy_that_a_gpu_starts_as_a_fusion_counts_where_it_starts() -> None:
    """As jax 0.11 writes it."""
    text = """
%fused (p0: f32[12,8,16], p1: s32[]) -> f32[1,8,16] {
  %p0 = f32[12,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %s = f32[1,8,16]{2,1,0} dynamic-slice(%p0, %p1, %z, %z), dynamic_slice_sizes={1,8,16}
}
ENTRY %main {
  %a = f32[12,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %start = ((f32[12,8,16]{2,1,0}, s32[]), f32[1,8,16]{2,1,0}, u32[]) fusion-start(%a, %i), kind=kLoop, calls=%fused
  ROOT %done = f32[1,8,16]{2,1,0} fusion-done(%start)
}
"""  # noqa: E501 — as compilers write it
    index, layer = 4, 8 * 16 * FLOAT
    assert moved(text) == index + 2 * layer


def test_a_transfer_to_fast_memory_counts_where_it_starts_and_only_in_the_devices_memory() -> None:
    text = """
ENTRY %main {
  %a = bf16[8,256]{1,0:T(8,128)(2,1)} parameter(0)
  %s = (bf16[8,256]{1,0:T(8,128)(2,1)S(1)}, bf16[8,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%a)
  %d = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} copy-done(%s)
  %r = ((bf16[8,256]{1,0:T(8,128)(2,1)}), bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:8], [0:128]}
  %e = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} slice-done(%r)
  ROOT %t = f32[8,256]{1,0:T(8,128)} tanh(%d)
}
"""  # noqa: E501 — as compilers write it
    assert moved(text) == 8 * 256 * 2 + 8 * 128 * 2 + 8 * 256 * FLOAT


def test_collectives_read_and_write_once_between_start_and_end() -> None:
    text = """
ENTRY %main {
  %a = f32[2,8]{1,0} parameter(0)
  %s = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%a), replica_groups={{0,1,2,3}}
  ROOT %d = f32[8,8]{1,0} all-gather-done(%s)
}
"""
    assert moved(text) == (16 + 64) * FLOAT


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]{:T(128)}", 4),
        ("bf16[3,64]{1,0}", 3 * 64 * 2),
        ("bf16[3,64]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
        ("bf16[3,64]{0,1:T(8,128)(2,1)}", 64 * 128 * 2),
        ("(f32[5,8]{1,0:T(8,128)}, f32[5,8]{1,0:T(8,128)S(1)}, u32[]{:S(2)})", 8 * 128 * 4),
    ],
)
def test_the_padding_of_tiles_is_moved_too(shape: str, size: int) -> None:
    assert device_bytes_of(shape) == size
