"""Commands whose standard streams are closed or a terminal."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOSED = """
import os, sys
from rungs.common import signals
signals.exit_on_signal()
for number in range(3):
    assert os.path.realpath(f"/proc/self/fd/{number}") == os.devnull, number
print(sys.stdin.read(), file=sys.stderr)
sys.exit(os.system("{ echo >&2; } 2>/dev/null"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_streams_that_are_closed_at_the_start_are_the_null_device() -> None:
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED]
    assert subprocess.run(command, check=False).returncode == 0


IN_UTF_8 = """
import click, sys
from rungs.common import command

@click.command()
def main():
    click.echo("\\u2192 \\ud800")
    sys.stdout.write(sys.stdin.readline())
    command.begin_command()
    print(ascii(sys.stdin.read()))

command.run_command(main)
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1:ignore"},
        {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
    ],
)
def test_streams_are_in_utf_8_in_any_environment(environment: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IN_UTF_8],
        input="é\n".encode() + b"\xff",
        capture_output=True,
        env=os.environ | environment,
        check=True,
    )
    assert ended.stdout.decode() == "→ \\ud800\né\n'\\udcff'\n"


def on_a_terminal(program: str) -> str:
    """Return what a program writes to a terminal that is its stdout and stderr."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    while True:
        try:
            written += os.read(ours, 4096)
        except OSError:  # Linux: the other end is closed
            break
    os.close(ours)
    process.wait()
    return written.decode()


SHOW = """
import click, sys
from rungs.common import command, run_log

@click.command()
def main():
    bar = run_log.TERMINAL
    click.echo("\\x1b[2Jname\\u202e")
    sys.stdout.write("\\x9b31mtext\\n")
    run_log.log_to_terminal()
    run_log.log.warning("\\x1b[1Alog\\r")
    bar.write("\\r50%\\x1b[A\\x1b[2J\\n")
    raise RuntimeError("\\x1b[2Jerror password=planted")

command.run_command(main)
"""


def test_a_terminal_gets_no_escape_sequences() -> None:
    written = on_a_terminal(SHOW)
    lines = written.split("\r\n")
    assert lines[:2] == [r"\x1b[2Jname\u202e", r"\x9b31mtext"]
    assert r"\x1b[1Alog\r" in written
    assert "\r50%\x1b[A\\x1b[2J" in written
    assert lines[-2] == r"RuntimeError: \x1b[2Jerror password=***"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_that_cannot_be_printed_has_its_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, ROOT / "charts.py", "no-such-run"], stderr=full, check=False
        )
    assert ended.returncode == 2
