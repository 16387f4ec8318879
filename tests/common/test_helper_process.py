"""Programs that run beside training: priority, session, start and end."""

import os
import sys
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from rungs.common.helper_process import (
    ENDED,
    KILLED,
    NICENESS,
    HelperProcess,
    process_executor,
    receive,
    start_python,
)
from rungs.common.signals import StopSignal

SHOW = "import os, pathlib, sys; sys.stdin.readline(); {what}; print(text, file=sys.stderr)"


def shown(what: str) -> str:
    """Return what a program prints, which waits until it is started and has its priority."""
    process = start_python(["-c", SHOW.format(what=what)], {"OWN": "here"})
    _, text = process.communicate("\n")
    return text.strip()


def test_it_has_a_low_priority_and_this_process_keeps_its_own() -> None:
    before = os.nice(0)
    assert shown("text = os.nice(0)") == str(min(before + NICENESS, 19))
    assert os.nice(0) == before


def test_it_has_a_session_of_its_own_and_this_environment() -> None:
    assert int(shown("text = os.getsid(0)")) != os.getsid(0)
    assert shown("text = os.environ['OWN']") == "here"
    assert shown("import rungs; text = sys.executable") == sys.executable


@pytest.mark.parametrize(("sent", "last"), [(["new\n", ENDED], ENDED), (["new\n"], KILLED)])
def test_the_last_line_says_whether_training_ended_or_was_killed(
    sent: list[str], last: str
) -> None:
    received = receive(sent)
    assert [received.get(timeout=60), received.get(timeout=60)] == ["new\n", last]


def test_a_process_starts_with_the_first_line() -> None:
    process = HelperProcess("test", "json.tool")  # which reads its input
    assert process.finish(StopSignal(), "nothing")
    process.kill()
    assert not process.is_started
    process.send("line")
    assert process.is_started
    process.kill()
    assert not process.is_started


class _TwoArgumentsError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one}, {two}")


def _raise_what_can_not_be_sent() -> None:
    raise _TwoArgumentsError("one", "two")


def test_a_function_in_its_own_process_ends_with_the_block() -> None:
    def interrupted() -> None:
        with process_executor() as executor:
            executor.submit(os.getpid).result()
            executor.submit(time.sleep, 600)
            raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - begun < 300


def test_a_crash_differs_from_an_error_that_can_not_be_sent() -> None:
    with pytest.raises(BrokenProcessPool) as crash, process_executor() as executor:
        executor.submit(os.abort).result()
    with pytest.raises(BrokenProcessPool) as error, process_executor() as executor:
        executor.submit(_raise_what_can_not_be_sent).result()
    assert (crash.value.__cause__ is None, error.value.__cause__ is None) == (True, False)
