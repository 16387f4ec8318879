"""Programs that run beside training: when they start, and how they learn of the end."""

import pytest

from rungs.common.helper_process import ENDED, KILLED, HelperProcess, receive
from rungs.common.signals import StopSignal


@pytest.mark.parametrize(("sent", "last"), [(["new\n", ENDED], ENDED), (["new\n"], KILLED)])
def test_the_last_line_says_whether_training_ended_or_was_killed(
    sent: list[str], last: str
) -> None:
    received = receive(sent)
    assert [received.get(timeout=60), received.get(timeout=60)] == ["new\n", last]


def test_a_process_starts_with_the_first_line() -> None:
    process = HelperProcess("test", "this")
    assert process.finish(StopSignal(), "nothing")
    process.kill()
    assert not process.is_started
    process.send("line")
    assert process.is_started
    process.kill()
    assert not process.is_started
