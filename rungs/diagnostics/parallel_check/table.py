"""The table that shows how a run trains in every way, next to one device."""

import time
from collections.abc import Iterator
from pathlib import Path

from rungs.config.run_config import RunConfig
from rungs.diagnostics.parallel_check.trial import (
    ROUNDING_TOLERANCE,
    Difference,
    ParallelCase,
    Trial,
    TrialResult,
    compare,
)
from rungs.planning.compiled_communication import Traffic

_ROW = "{:8} {:>11} {:>7}  {:>9} {:>9} {:>12}  {}"
_HEAD = _ROW.format(
    "mode", "data×tensor", "A×B", "loss", "gradient", "bytes/device", "a device sends in a step"
)
_UNDER = " " * len(_ROW.format(*[""] * 7))


def is_all_alike(path: Path, config: RunConfig, trial: Trial, devices: int) -> bool:
    """Train in every way and print the table, a row as soon as it is known.

    Args:
        path, config: of the run.
        devices: at most so many.

    Returns:
        Whether no difference is above its tolerance.
    """
    meshes, misfits = trial.meshes(devices)
    cases = [case for mesh in meshes for case in trial.splits(*mesh)]
    print(*_header(path, config, trial), *misfits, "", _HEAD, sep="\n", flush=True)
    start = time.perf_counter()
    too_far = list(_compared(trial, cases))
    seconds = time.perf_counter() - start
    print("", f"{len(cases)} ways in {seconds:.0f} s, {len(too_far)} too far", *too_far, sep="\n")
    return not too_far


def _header(path: Path, config: RunConfig, trial: Trial) -> Iterator[str]:
    """What is trained, how that differs from the run, and what it is compared with."""
    own_sequences = config.train.sequences_per_step
    own_tokens = config.sequence_length
    _, sequences, tokens = trial.batches[0].inputs_ABS.shape
    of_sequences = f" of the {own_sequences:,}" * (sequences < own_sequences)
    of_tokens = f" of the {own_tokens:,}" * (tokens < own_tokens)
    own = _place(trial.reference())[2]
    steps = len(trial.batches)
    yield (
        f"{path}: {steps} step{'s' * (steps > 1)} from the start, each {sequences:,}{of_sequences}"
        f" sequences of {tokens:,}{of_tokens} tokens,"
    )
    yield "in float32, without warm-up, on virtual CPU devices. A×B: A microbatches of B sequences."
    yield (
        f"loss, gradient: relative difference from one device with {own}, by rounding at most"
        f" {ROUNDING_TOLERANCE:.0e}; ! is too far."
    )
    yield "bytes/device: parameters and optimizer state."
    if trial.reference().balanced:
        yield (
            f"The load-balancing loss is one of each microbatch, so only rows of {own} have it; the"
            " others are"
        )
        yield "compared with one device that has not."


def _compared(trial: Trial, cases: list[ParallelCase]) -> Iterator[str]:
    """Print each case as it is done; a line for each that is too far from one device."""
    references: dict[bool, TrialResult] = {}
    for case in cases:
        reference = trial.reference(case.balanced)
        if case.balanced not in references:
            references[case.balanced] = trial.train(reference)
        expected = references[case.balanced]
        if case == reference:
            print(*_lines(case, expected), sep="\n", flush=True)
            continue
        outcome = trial.train(case)
        difference = compare(outcome, expected)
        print(*_lines(case, outcome, difference), sep="\n", flush=True)
        if any(difference.exceeds):
            yield " ".join(_place(case)) + f": most of it in {difference.most_in}"


def _lines(
    case: ParallelCase, outcome: TrialResult, difference: Difference | None = None
) -> Iterator[str]:
    """A row of the table."""
    size = _size(outcome.bytes_per_device)
    sent, *more = [*map(_sent, outcome.traffic)] or ["nothing"]
    if difference and difference.rerouted:
        loss, gradient = difference.tolerances
        more.append(f"{difference.rerouted} to other experts: at most {loss:.0e}, {gradient:.0e}")
    yield _ROW.format(*_place(case), *_figures(difference), size, sent)
    yield from (_UNDER + line for line in more)


def _figures(difference: Difference | None) -> Iterator[str]:
    """How far loss and gradient are, marked where that is too far."""
    if difference is None:
        yield from ("– ", "– ")
        return
    for value, exceeds in zip(difference, difference.exceeds, strict=False):
        yield f"{value:.1e}" + ("!" if exceeds else " ")


def _place(case: ParallelCase) -> tuple[str, str, str]:
    return (
        case.mode,
        f"{case.data}×{case.tensor}",
        f"{case.microbatches}×{case.microbatch_size}",
    )


def _sent(traffic: Traffic) -> str:
    axes = "+".join(traffic.axes)
    return f"{traffic.kind} {axes}: {traffic.runs:,}, {_size(traffic.moved_bytes)}"


def _size(count: float) -> str:
    """A number of bytes, to read."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB"
