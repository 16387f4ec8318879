"""Measure parts one after another, each in a process of its own, and stop in time."""

import json
import os
import queue
import re
import shutil
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
from benchmarks.gpu_parts.part_process import END
from benchmarks.gpu_parts.parts import Part
from benchmarks.gpu_parts.results import Results, mark
from benchmarks.gpu_parts.setting import NEEDS_GPU, ROOT, Setting

SPARE_SECONDS = 2.0
"""Of the session's time, for its end."""
PATIENCE, REHEARSAL_PATIENCE, LEAST_PATIENCE_SECONDS = 2.5, 20.0, 60.0
"""A part is stopped when it takes that many times as long as expected, and so many seconds. A CPU
may be busy with other work."""
END_SECONDS = 10.0
"""For the end of a part's process after its last figure."""
LAST_LINES = 20
"""Of what a part that failed has written to stderr, how many are kept."""
AUTOTUNED = Path(tempfile.gettempdir()) / "rungs-autotuned.txt"
"""Where XLA writes what it has chosen. All processes have the same path, because the compilation
cache distinguishes programs by their flags."""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b|error:|.* failed:")


def measure(results: Results, parts: Mapping[str, Part], setting: Setting, end: float) -> None:
    """Measure what is missing and fits: first what was never tried, last what has failed.

    Args:
        parts: by the name under which the results have them.
        end: by `time.monotonic()`.
    """
    for name, part in sorted(parts.items(), key=lambda item: results.tries(item[0])):
        left = end - SPARE_SECONDS - time.monotonic()
        expected = max(part.seconds(setting), results.seconds_before(name))
        if results.is_done(name):
            click.echo(f"\n{name}: measured before")
        elif expected > left:
            why = f"needs about {expected:.0f} s; {max(left, 0):.0f} s left"
            click.echo(f"\n{name}: skipped: {why}")
            results.skip(name, why)
        else:
            patience = REHEARSAL_PATIENCE if setting.rehearse else PATIENCE
            longest = max(patience * expected, LEAST_PATIENCE_SECONDS)
            _measure_part(results, name, part, setting, min(left, longest))


def _measure_part(
    results: Results, name: str, part: Part, setting: Setting, seconds: float
) -> None:
    """Measure a part for at most so many seconds."""
    click.echo(f"\n{name}: {part.what}")
    results.begin(name, part.what)
    begin = time.monotonic()
    has_ended = False
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        with _process(part, setting, errors) as process:
            for line in _lines(process, begin + seconds):
                if has_ended := line.strip() == END:
                    break
                figure = Figure(**json.loads(line))
                results.add(name, figure)
                click.echo(f"  {figure.name:44} {figure.as_text():34} {mark(figure)}".rstrip())
            is_late = not has_ended and time.monotonic() > begin + seconds
            with suppress(subprocess.TimeoutExpired):
                process.wait(0 if is_late else END_SECONDS)
            code = process.returncode
        errors.seek(0)
        last = errors.read().splitlines()[-LAST_LINES:]
    took = time.monotonic() - begin
    if has_ended:
        results.end(name, "done", took)
        click.echo(f"  done in {took:.0f} s")
    elif code is None:
        results.end(name, "stopped", took, f"took more than {took:.0f} s", last)
        click.echo(f"  stopped after {took:.0f} s")
    else:
        results.end(name, "failed", took, _reason(last, code), last)
        click.echo("\n".join([f"  failed after {took:.0f} s:", *last]), err=True)
    if part.has_steps:
        _keep_autotuned(results.path.with_suffix(f".{part.name}.autotuned.txt"))


def _reason(lines: list[str], code: int) -> str:
    """Return why a process failed: the last line that looks like an error."""
    errors = [line for line in lines if _ERROR.match(line)]
    return errors[-1] if errors else f"exit code {code}: {lines[-1] if lines else 'no message'}"


@contextmanager
def _process(part: Part, setting: Setting, errors: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a part's process, and end it with all that it has started."""
    script = str(Path(__file__).with_name("part_process.py"))
    process = subprocess.Popen(
        [sys.executable, script, part.module, setting.as_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=_environment(setting),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(setting: Setting) -> dict[str, str]:
    """Return the environment of a part: its platform, which must be there, where XLA writes the
    matmuls that it chose, and this checkout, which need not be installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    dump = f"--xla_gpu_dump_autotune_results_to={AUTOTUNED}"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu" if setting.rehearse else "cuda,cpu",
        NEEDS_GPU: "" if setting.rehearse else "1",
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


def _keep_autotuned(place: Path) -> None:
    """Keep what XLA has chosen, unless there is more from an earlier try, which had to choose."""
    with suppress(OSError):
        if not place.exists() or place.stat().st_size < AUTOTUNED.stat().st_size:
            shutil.copy(AUTOTUNED, place)
        AUTOTUNED.unlink()
