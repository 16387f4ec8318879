"""Where the time of GPT-2's step goes, next to the least time of the same program.

The parts are measured with the profiler and so without CUDA graphs.
"""

from collections.abc import Iterator

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import GPT2_SMALL, Setting
from benchmarks.gpu_parts.step_variants import config_of
from benchmarks.step_cost.profiled_step import Profile, longest, measure
from rungs.run.folder import RunFolder

KERNELS = 30


def figures(setting: Setting) -> Iterator[Figure]:
    turns, steps = (1, 1) if setting.rehearse else (5, 5)
    found = measure(RunFolder(GPT2_SMALL), config_of({}, setting), turns, steps)
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
    bounds, measured = found.bounds, found.seconds_by_part
    for part, seconds in measured.items():
        least = 1e3 * bounds[part].serial_seconds if part in bounds else None
        note = f"least {least:,.2f} ms" if least is not None else ""
        yield Figure(part, [1e3 * seconds], "ms", note)
    least = 1e3 * sum(work.serial_seconds for work in bounds.values())
    yield Figure(
        "sum", [1e3 * sum(measured.values())], "ms", f"least {least:,.2f} ms" if bounds else ""
    )
