"""The table that shows how a run stands before it is trained."""

import time
from collections.abc import Iterator
from pathlib import Path

from rungs.config.run_config import RunConfig
from rungs.diagnostics.model_check.checks import CheckResult, findings
from rungs.diagnostics.model_check.subject import Patient

_ROW = "{:14} {:7} {}"
_UNDER = " " * 23


def failed_checks(path: Path, config: RunConfig, patient: Patient) -> list[str]:
    """Check and print the table, a row as soon as it is known.

    Args:
        path, config: of the run.

    Returns:
        The names of the checks that failed.
    """
    print(*_header(path, config, patient), sep="\n", flush=True)
    start = time.perf_counter()
    done = []
    for finding in findings(patient):
        print(*_lines(finding), sep="\n", flush=True)
        done.append(finding)
    failed = [finding.check for finding in done if finding.passed is False]
    seconds = time.perf_counter() - start
    print(
        "",
        f"{len(done)} checks in {seconds:.0f} s; failed: {', '.join(failed) or 'none'}",
        sep="\n",
    )
    return failed


def _header(path: Path, config: RunConfig, patient: Patient) -> Iterator[str]:
    sequences, tokens = patient.inputs_BS.shape
    of_tokens = config.sequence_length
    weights = "fresh weights" if patient.before is None else f"the weights of {patient.before.path}"
    yield f"{path}: the first {sequences} sequences, {tokens:,} of their {of_tokens:,} tokens, on"
    yield f"{weights}, without dropout, on one CPU device."


def _lines(finding: CheckResult) -> Iterator[str]:
    verdict = {True: "ok", False: "FAILED", None: "–"}[finding.passed]
    yield _ROW.format(finding.check, verdict, finding.measured)
    yield f"{_UNDER}expected: {finding.expected}"
    yield from (_UNDER + note for note in finding.notes)
