"""Measure parts one after another, each in a process of its own, and stop in time."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import click

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.parts import Part
from benchmarks.gpu_parts.results import Results, mark
from benchmarks.gpu_parts.setting import ROOT, Setting
from benchmarks.side_process import failure

SPARE_SECONDS = 2.0
"""Of the session's time, for its end."""
AUTOTUNED = ".autotuned.txt"
"""What a session's autotuner chose, beside its file; each part has its own."""


def measure(results: Results, parts: Mapping[str, Part], setting: Setting, end: float) -> None:
    """Measure what is missing and fits.

    Args:
        parts: by the name under which the results have them.
        end: by `time.monotonic()`.
    """
    for name, part in parts.items():
        left = end - SPARE_SECONDS - time.monotonic()
        needed = max(part.seconds(setting), results.seconds_before(name))
        if results.is_done(name):
            click.echo(f"\n{name}: measured before")
        elif needed > left:
            why = f"takes {needed:.0f} s, and {max(left, 0):.0f} are left"
            click.echo(f"\n{name}: skipped: {why}")
            results.end(name, "skipped", why=why)
        else:
            _measure_part(results, name, part, setting, left)


def _measure_part(
    results: Results, name: str, part: Part, setting: Setting, seconds: float
) -> None:
    """Measure a part for at most so many seconds."""
    click.echo(f"\n{name}: {part.what}")
    results.begin(name)
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        with _process(part, setting, errors, results.path) as process:
            for line in _lines(process, begin + seconds):
                figure = Figure(**json.loads(line))
                results.add(name, figure)
                click.echo(f"  {figure.name:44} {figure.as_text():34} {mark(figure)}".rstrip())
            is_late = time.monotonic() > begin + seconds
        took = time.monotonic() - begin
        errors.seek(0)
        if is_late:
            results.end(name, "stopped", took, "the session's time was over")
            click.echo(f"  stopped after {took:.0f} s")
        elif process.returncode:
            why = failure(name, errors.read())
            results.end(name, "failed", took, why.splitlines()[-1])
            click.echo(f"  failed after {took:.0f} s: {why}", err=True)
        else:
            results.end(name, "done", took)
            click.echo(f"  done in {took:.0f} s")
    _keep_autotuned(results.path, name)


@contextmanager
def _process(
    part: Part, setting: Setting, errors: IO[str], file: Path
) -> Iterator[subprocess.Popen[str]]:
    """Run a part's process, and end it with all that it has started."""
    script = str(Path(__file__).with_name("part_process.py"))
    process = subprocess.Popen(
        [sys.executable, script, part.module, setting.as_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=_environment(setting, file),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(setting: Setting, file: Path) -> dict[str, str]:
    """Return the environment of a part: its platform, where XLA writes the matmuls that it chose,
    and this checkout, which need not be installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    dump = f"--xla_gpu_dump_autotune_results_to={file.resolve().with_suffix(AUTOTUNED)}"
    return {
        "JAX_PLATFORMS": "cpu" if setting.rehearse else "cuda,cpu",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {dump}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def _lines(process: subprocess.Popen[str], end: float) -> Iterator[str]:
    """Yield what a process prints, until it ends or the time is over."""
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    output = process.stdout

    def read() -> None:
        for line in output:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    with suppress(queue.Empty):
        while line := lines.get(timeout=max(end - time.monotonic(), 0)):
            yield line
        process.wait(max(end - time.monotonic(), 0.1))


def _keep_autotuned(file: Path, part: str) -> None:
    """Keep what a part's process has written, which the next one overwrites. All processes write to
    the same path, because XLA's compilation cache distinguishes programs by their flags."""
    written = file.with_suffix(AUTOTUNED)
    if written.exists():
        written.replace(file.with_suffix(f".{part}{AUTOTUNED}"))
