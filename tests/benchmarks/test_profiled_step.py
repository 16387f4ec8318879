"""Times of kernels, added up by the part of the step that they belong to."""

from types import SimpleNamespace
from typing import Any

from benchmarks.step_cost.profiled_step import (
    OTHER,
    SHARED,
    Kernel,
    Profile,
    kernels_of,
    longest,
    part_by_name,
    table,
)
from rungs.planning.compiled.hlo import Module
from rungs.planning.compiled.roofline import Work

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


def test_a_gpu_has_kernels_in_its_streams_and_a_cpu_in_its_threads() -> None:
    threads = line("thread", ("tanh", "norm", 3e6), ("python", "", 9e6))
    streams = line("Stream #13", ("tanh_1", "norm", 2e6), ("memset", "", 1e6))
    summary = line("XLA Ops", ("norm", "norm", 2e6))
    host = SimpleNamespace(name="/host:CPU", lines=[threads])
    gpu = SimpleNamespace(name="/device:GPU:0", lines=[streams, summary])
    on_cpu: Any = SimpleNamespace(planes=[host])
    on_gpu: Any = SimpleNamespace(planes=[gpu, host])
    assert [*kernels_of(on_cpu)] == [Kernel("tanh", "norm", 0.003)]
    assert [*kernels_of(on_gpu)] == [Kernel("tanh_1", "norm", 0.002), Kernel("memset", "", 0.001)]


def test_a_kernel_that_parts_share_belongs_to_none_of_them() -> None:
    assert PARTS["norm"] == "norms and the rest"
    assert PARTS["last"] == "optimizer"
    assert PARTS["two"] == "head and loss"
    assert PARTS["one"] == SHARED


def test_times_are_those_of_a_step_next_to_the_least() -> None:
    kernels = [
        *[Kernel("k", "loss", 0.004)] * 2,
        *[Kernel("k", "two", 0.002)] * 2,
        Kernel("memset", "", 0.004),
    ]
    bound: Any = SimpleNamespace(parts={"head and loss": Work(0, 0, 0.001, 0.002, 0.003)})
    found = Profile("gpu", 1, [0.01], kernels, 2, PARTS, bound)
    lines = [line.split() for line in table(found).splitlines()]
    assert lines[1] == ["head", "and", "loss", "6.00", "75.0%", "2.00", "3.00", "2.00"]
    assert lines[2] == [*OTHER.split(), "2.00", "25.0%"]
    assert lines[3] == ["sum", "8.00", "100.0%", "2.00", "3.00", "2.67"]


def test_the_longest_kernels_come_first_with_all_their_runs() -> None:
    loss = [*[Kernel("b", "loss", 0.002)] * 2, *[Kernel("b", "again", 0.002)] * 2]
    found = Profile("gpu", 1, [], [Kernel("a", "norm", 0.003), *loss], 2, PARTS, None)
    first, second = longest(found, 2)
    assert first == ("head and loss", "b", 2.0, 0.004)
    assert second == ("norms and the rest", "a", 0.5, 0.0015)
