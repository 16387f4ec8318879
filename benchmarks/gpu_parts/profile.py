"""Where the time of GPT-2's step goes.

The parts are measured with the profiler and so without CUDA graphs.
"""

from collections.abc import Iterator

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import config_of
from benchmarks.step_cost.profiled_step import Profile, longest, measure

KERNELS = 30


def figures(setting: Setting) -> Iterator[Figure]:
    turns, steps = (1, 1) if setting.rehearse else (5, 5)
    found = measure(config_of({}, setting), turns, steps)
    utilization = found.utilization
    note = "without the profiler"
    if utilization is not None:
        note += f"; {utilization:.1%} of the published peak"
    yield Figure("a step", [1e3 * seconds for seconds in found.seconds], "ms", note)
    yield from _parts(found)
    for one in longest(found, KERNELS):
        note = f"{one.part}; {one.times:,.0f} runs"
        yield Figure(one.kernel[:60], [1e3 * one.seconds], "ms", note)


def _parts(found: Profile) -> Iterator[Figure]:
    measured = found.seconds_by_part
    for part, seconds in (measured | {"sum": sum(measured.values())}).items():
        yield Figure(part, [1e3 * seconds], "ms", "")
