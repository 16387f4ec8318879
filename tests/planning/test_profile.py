"""What the profiler saw, kernel by kernel, and the part that each belongs to."""

from types import SimpleNamespace
from typing import Any

import pytest

from rungs.planning.profile import (
    COLLECTIVES,
    COPIES,
    OTHER,
    REST,
    SHARED,
    Kernel,
    host_seconds,
    kernels_of,
    part_by_name,
    part_of,
    seconds_by_part,
)
from rungs.planning.program import Module

PROGRAM = """
ENTRY %main {
  %x = f32[8,16]{1,0} parameter(0)
  %norm = f32[8,16]{1,0} tanh(%x), metadata={op_name="jit(train_step)/norm/tanh" deduplicated_name="one"}
  %loss = f32[8,16]{1,0} tanh(%norm), metadata={op_name="jit(train_step)/loss/tanh" deduplicated_name="two"}
  %again = f32[8,16]{1,0} tanh(%loss), metadata={op_name="jit(train_step)/loss/tanh" deduplicated_name="two"}
  ROOT %last = f32[8,16]{1,0} tanh(%again), metadata={op_name="jit(train_step)/optimizer/tanh" deduplicated_name="one"}
}
"""  # noqa: E501 — as compilers write it
PARTS = part_by_name(Module.parse(PROGRAM))


def line(name: str, *kernels: tuple[str, str, float]) -> SimpleNamespace:
    """A thread or stream, with kernels, their instructions and nanoseconds."""
    events = [
        SimpleNamespace(name=name, stats=[("hlo_op", op)] if op else [], duration_ns=time)
        for name, op, time in kernels
    ]
    return SimpleNamespace(name=name, events=events)


def test_each_kind_of_device_has_its_kernels_elsewhere() -> None:
    threads = line("thread", ("tanh", "norm", 3e6), ("python", "", 9e6))
    streams = line("Stream #13", ("tanh_1", "norm", 2e6), ("memset", "", 1e6))
    summary = line("XLA Ops", ("norm", "norm", 2e6))
    host = SimpleNamespace(name="/host:CPU", lines=[threads])
    gpu = SimpleNamespace(name="/device:GPU:0", lines=[streams, summary])
    operations = line("XLA Ops", ("%norm = f32[8,16] tanh(%x)", "", 4e6), ("loss", "", 1e6))
    tpu = SimpleNamespace(name="/device:TPU:0", lines=[operations, line("Steps", ("1", "", 9e6))])
    on_tpu: Any = SimpleNamespace(planes=[tpu, host])
    on_cpu: Any = SimpleNamespace(planes=[host])
    on_gpu: Any = SimpleNamespace(planes=[gpu, host])
    assert [*kernels_of(on_cpu)] == [Kernel("tanh", "norm", 0.003)]
    assert [*kernels_of(on_gpu)] == [Kernel("tanh_1", "norm", 0.002), Kernel("memset", "", 0.001)]
    assert [(one.instruction, one.seconds) for one in kernels_of(on_tpu)] == [
        ("norm", 0.004),
        ("loss", 0.001),
    ]


def test_a_kernel_that_parts_share_belongs_to_none_of_them() -> None:
    assert PARTS["norm"] == "norms and the rest"
    assert PARTS["last"] == "optimizer"
    assert PARTS["two"] == "head and loss"
    assert PARTS["one"] == SHARED


def test_seconds_are_added_by_part() -> None:
    kernels = [Kernel("k", "loss", 2.0), Kernel("k", "two", 1.0), Kernel("memset", "", 0.5)]
    assert seconds_by_part(kernels, PARTS) == {"head and loss": 3.0, OTHER: 0.5}


def test_what_the_host_did_under_a_name_is_added_up() -> None:
    threads = line("python", ("data", "", 2e6), ("data", "", 3e6), ("other", "", 9e6))
    trace: Any = SimpleNamespace(planes=[SimpleNamespace(name="/host:CPU", lines=[threads])])
    assert host_seconds(trace, "data") == 0.005


STEP = """
%fused_matmul (p0: f32[8,16], p1: f32[16,16]) -> f32[8,16] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = f32[16,16]{1,0} parameter(1)
  %dot = f32[8,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(train_step)/transpose(jvp(feed_forward))/dot_general"}
  ROOT %add = f32[8,16]{1,0} add(%dot, %p0), metadata={op_name="jit(train_step)/norm/add"}
}
%fused_slice (q0: f32[4,16,16], q1: s32[]) -> f32[16,16] {
  %q0 = f32[4,16,16]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %one = s32[] constant(1)
  %last = s32[] subtract(%q1, %one)
  %slice = f32[1,16,16]{2,1,0} dynamic-slice(%q0, %last, %one, %one), metadata={op_name="jit(train_step)/norm/slice"}
  ROOT %b = f32[16,16]{1,0} bitcast(%slice)
}
%fused_nameless (r0: f32[8,16]) -> f32[8] {
  %r0 = f32[8,16]{1,0} parameter(0)
  %exp = f32[8,16]{1,0} exponential(%r0), metadata={op_name="jit(train_step)/jvp(loss)/while/body/exp"}
  ROOT %sum = f32[8]{0} reduce(%exp, %r0), dimensions={1}, to_apply=%add
}
ENTRY %main {
  %x = f32[8,16]{1,0} parameter(0), metadata={op_name="loss"}
  %w = f32[4,16,16]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %moved = f32[16,16]{1,0} fusion(%w, %i), kind=kLoop, calls=%fused_slice
  %started = ((f32[4,16,16]{2,1,0}, s32[]), f32[16,16]{1,0}, u32[]) fusion-start(%w, %i), kind=kLoop, calls=%fused_slice
  %matmul = f32[8,16]{1,0} fusion(%x, %moved), kind=kOutput, calls=%fused_matmul, metadata={op_name="jit(train_step)/norm/add"}
  %nameless = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_nameless
  %inner = f32[8,16]{1,0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(train_step)/attention_projections/attention/kernel"}
  %outer = f32[8,16]{1,0} negate(%x), metadata={op_name="jit(train_step)/attention_projections/neg"}
  %other = f32[8,16]{1,0} negate(%x), metadata={op_name="jit(train_step)/loss_limit/optimizer"}
  %sum = f32[8,16]{1,0} all-reduce(%x), to_apply=%add, metadata={op_name="jit(train_step)/feed_forward/psum"}
  %copied = (f32[8,16]{0,1}, f32[8,16]{1,0}, u32[]) copy-start(%x)
  %unused = (f32[8,16]{1,0:S(1)}, f32[8,16]{1,0}, u32[]) copy-start(%x)
}
%f (s0: f32[128]) -> f32[128] {
  %s0 = f32[128]{0} parameter(0)
  ROOT %e = f32[128]{0} exponential(%s0)
}
"""  # noqa: E501 — as compilers write it


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("matmul", "feed-forward"),
        ("moved", COPIES),
        ("started", COPIES),
        ("nameless", "head and loss"),
        ("inner", "attention kernel"),
        ("outer", "attention projections"),
        ("other", REST),
        ("sum", COLLECTIVES),
        ("copied", COPIES),
        ("unused", COPIES),
    ],
)
def test_the_innermost_scope_says_what_an_instruction_belongs_to(name: str, part: str) -> None:
    module = Module.parse(STEP)
    (found,) = (one for one in module.computations["main"] if one.name == name)
    assert part_of(found, module) == part
