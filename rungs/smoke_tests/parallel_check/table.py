"""The table of all cases: differences of their results from training on one device."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rungs.common.shown_text import counted
from rungs.config.run_config import RunConfig
from rungs.planning.compiled.collectives import Traffic
from rungs.smoke_tests.parallel_check.check import CaseResult, ParallelCase, ParallelCheck

_ROW = "{:8} {:>11} {:>7}  {:>9} {:>9} {:>9} {:>12}  {}"
_HEADINGS = ("mode", "mesh", "A×B", "loss", "gradient", "update", "bytes/device")
_HEADER_ROW = _ROW.format(*_HEADINGS, "sent per device and step")
_INDENT = " " * len(_ROW.format(*[""] * 8))
ROUNDING_TOLERANCE = 1e-5
"""Largest relative difference of loss, gradient and update from one device. Rounding changes a
float32 by up to 6e-8; in the committed runs and GPT-2's shape, other orders of summation gave at
most 2e-7 (loss) and 1e-6 (gradient). A missing or double-counted part of the gradient is found if
it is more than this share of the total."""
MAX_REROUTED_TOKENS = 3
"""Tokens that rounding may reroute to another expert with almost the same score."""
REROUTED_LOSS_TOLERANCE, REROUTED_GRADIENT_TOLERANCE = 1e-3, 1e-2
"""Tolerances in that case. In runs/mixtral, rerouting one of 2,048 tokens changed a loss by 6e-5
and a gradient by 1e-3; two of 256 tokens, 3e-4 and 7e-3."""


class Difference(NamedTuple):
    """Relative difference from one device."""

    loss: float
    """The largest of all steps."""
    gradient: float
    """Norm of the difference over the norm, over all parameters."""
    update: float
    """The same for the optimizer's change from the same gradient."""
    most_in: str
    """The parameter with the largest difference in gradient or, if gradients agree, in change."""
    rerouted: int
    """Tokens routed to another expert, in the step with the most."""

    @property
    def tolerances(self) -> tuple[float, float, float]:
        """The tolerances of loss, gradient and update."""
        if 0 < self.rerouted <= MAX_REROUTED_TOKENS:  # few enough to be explained by rounding
            return REROUTED_LOSS_TOLERANCE, REROUTED_GRADIENT_TOLERANCE, ROUNDING_TOLERANCE
        return ROUNDING_TOLERANCE, ROUNDING_TOLERANCE, ROUNDING_TOLERANCE

    @property
    def exceeds(self) -> tuple[bool, bool, bool]:
        """Whether loss, gradient and update exceed their tolerances, as NaN does."""
        loss, gradient, update = self.tolerances
        return not self.loss <= loss, not self.gradient <= gradient, not self.update <= update


def run_check(path: Path, config: RunConfig, check: ParallelCheck, devices: int) -> bool:
    """Train every case on at most `devices` devices and print a table, each row as soon as it is
    known. Return whether all differences are within their tolerances."""
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
    """Describe the training, how it differs from the run, and the reference."""
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
    """Print each case's row when it is done. Yield a line for each that exceeds a tolerance."""
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


def compare(found: CaseResult, expected: CaseResult) -> Difference:
    """Return the differences of a result from the expected one."""
    gradient, most_in_gradient = relative_difference(found.gradient, expected.gradient)
    update, most_in_change = relative_difference(found.change, expected.change)
    rerouted = np.abs(found.expert_tokens - expected.expert_tokens).reshape(len(found.losses), -1)
    return Difference(
        float(np.abs(found.losses / expected.losses - 1).max()),
        gradient,
        update,
        most_in_change if gradient <= ROUNDING_TOLERANCE < update else most_in_gradient,
        int(rerouted.sum(axis=-1).max()) // 2,
    )


def relative_difference(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> tuple[float, str]:
    """Return the norm of all differences over the norm of all expected values, and the name with
    the largest difference."""
    squares = {name: _square(found[name] - array) for name, array in expected.items()}
    apart, norm = math.sqrt(sum(squares.values())), math.sqrt(sum(map(_square, expected.values())))
    most_in = max(squares, key=lambda name: squares[name])
    return (apart / norm if norm else math.inf if apart else 0.0), most_in


def _square(array: np.ndarray) -> float:
    """Return the sum of the squares."""
    return float(np.square(array, dtype=np.float64).sum())
