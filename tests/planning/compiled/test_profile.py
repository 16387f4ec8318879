"""What the profiler saw, kernel by kernel, and the part that each belongs to."""

from types import SimpleNamespace
from typing import Any

from rungs.planning.compiled.hlo import Module
from rungs.planning.compiled.profile import (
    OTHER,
    SHARED,
    Kernel,
    host_seconds,
    kernels_of,
    part_by_name,
    seconds_by_part,
)

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
