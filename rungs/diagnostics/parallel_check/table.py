"""The table of all cases."""

import time
from collections.abc import Iterator
from pathlib import Path

from rungs.common.text_table import counted
from rungs.config.run_config import RunConfig
from rungs.diagnostics.parallel_check.check import ParallelCheck
from rungs.diagnostics.parallel_check.comparison import (
    ROUNDING_TOLERANCE,
    CaseResult,
    Difference,
    ParallelCase,
    compare,
)
from rungs.planning.compiled.collectives import Traffic

_ROW = "{:8} {:>11} {:>7}  {:>9} {:>9} {:>9} {:>12}  {}"
_HEADER_ROW = _ROW.format(
    "mode",
    "mesh",
    "A×B",
    "loss",
    "gradient",
    "update",
    "bytes/device",
    "sent per device and step",
)
_INDENT = " " * len(_ROW.format(*[""] * 8))


def run_check(path: Path, config: RunConfig, check: ParallelCheck, devices: int) -> bool:
    """Train every case and print a table, each row as soon as it is known.

    Args:
        path: of the run.
        config: of the run.
        devices: maximum number of devices.

    Returns:
        Whether all differences are within their tolerances.
    """
    meshes, problems = check.meshes(devices)
    cases = [case for mesh in meshes for case in check.splits(*mesh)]
    print(*_header(path, config, check), *problems, "", _HEADER_ROW, sep="\n", flush=True)
    start = time.perf_counter()
    failures = list(_print_rows(check, cases))
    seconds = time.perf_counter() - start
    print(f"\n{len(cases)} cases in {seconds:.0f} s, {len(failures)} above tolerance")
    print(*failures, sep="\n", end="\n" if failures else "")
    return not failures


def _header(path: Path, config: RunConfig, check: ParallelCheck) -> Iterator[str]:
    """Say what is trained, how that differs from the run, and what it is compared with."""
    _, sequences, tokens = check.batches[0].inputs_ABS.shape
    own_sequences, own_tokens = config.train.sequences_per_step, config.sequence_length
    of_sequences = f" of the {own_sequences:,}" * (sequences < own_sequences)
    of_tokens = f" of the {own_tokens:,}" * (tokens < own_tokens)
    own = _columns(check.reference())[2]
    steps = len(check.batches)
    yield (
        f"{path}: the first {counted(steps, 'step')}, each with {sequences:,}{of_sequences}"
        f" sequences of {tokens:,}{of_tokens} tokens,"
    )
    yield "in float32, without warm-up, on virtual CPU devices. A×B: A microbatches of B sequences."
    yield (
        f"loss, gradient: relative difference from one device with {own}. Rounding gives at most"
        f" {ROUNDING_TOLERANCE:.0e}; ! marks more."
    )
    yield f"update: the same of what {config.train.optimizer} changes, given the same gradient."
    yield "mesh: devices along data × tensor; in cp, data × context."
    yield "bytes/device: parameters and optimizer state."
    if check.reference().balanced:
        yield f"The load-balancing loss depends on the microbatches, so only rows with {own} have"
        yield "it. The others are compared with one device without it."


def _print_rows(check: ParallelCheck, cases: list[ParallelCase]) -> Iterator[str]:
    """Print the row of each case when it is done. Yield a line for each that exceeds tolerance."""
    references: dict[bool, CaseResult] = {}
    for case in cases:
        reference = check.reference(case.balanced)
        if case.balanced not in references:
            references[case.balanced] = check.train(reference)
        expected = references[case.balanced]
        if case == reference:
            print(*_lines(case, expected), sep="\n", flush=True)
            continue
        result = check.train(case, expected.gradient)
        difference = compare(result, expected)
        print(*_lines(case, result, difference), sep="\n", flush=True)
        if any(difference.exceeds):
            yield " ".join(_columns(case)) + f": largest difference in {difference.most_in}"


def _lines(
    case: ParallelCase, result: CaseResult, difference: Difference | None = None
) -> Iterator[str]:
    """Yield the lines of a row."""
    size = _format_bytes(result.bytes_per_device)
    traffic, *more = [*map(_format_traffic, result.traffic)] or ["nothing"]
    if difference and difference.rerouted:
        loss, gradient, _ = difference.tolerances
        more.append(
            f"{difference.rerouted} tokens to other experts: tolerances {loss:.0e}, {gradient:.0e}"
        )
    yield _ROW.format(*_columns(case), *_format_difference(difference), size, traffic)
    yield from (_INDENT + line for line in more)


def _columns(case: ParallelCase) -> tuple[str, str, str]:
    """Return mode, mesh and split."""
    split = f"{case.microbatches}×{case.microbatch_size}"
    return case.mode, f"{case.data}×{case.last}", split


def _format_difference(difference: Difference | None) -> Iterator[str]:
    """Yield the columns of loss, gradient and update."""
    if difference is None:
        yield from ("– ", "– ", "– ")
        return
    for value, exceeds in zip(difference, difference.exceeds, strict=False):
        yield f"{value:.1e}" + ("!" if exceeds else " ")


def _format_traffic(traffic: Traffic) -> str:
    axes = "+".join(traffic.axes)
    return f"{traffic.kind} {axes}: {traffic.runs:,}, {_format_bytes(traffic.moved_bytes)}"


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB"
