"""The program that redraws a run's charts: `python -m rungs.report.drawer RUN`. Each input line is
a request; requests that arrive while it draws are merged. An empty line means the run has ended."""

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from rungs.common.errors import RunFailure, UserError, reason
from rungs.common.helper_process import ENDED, KILLED, receive
from rungs.run.folder import RunFolder


def main(run: RunFolder, lines: Iterable[str]) -> None:
    """Draw the charts of a run on each request."""
    for _ in _requests(lines):
        try:
            # here, because this import may fail or warn
            from rungs.report.run_charts import draw_run

            draw_run(run.path)
        except Exception as error:  # the next drawing may work
            kind = "" if isinstance(error, UserError | RunFailure) else f"{type(error).__name__}: "
            print(f"not drawn: {kind}{reason(error)}", file=sys.stderr, flush=True)


def _requests(lines: Iterable[str]) -> Iterator[None]:
    """Yield once for all requests that have arrived so far."""
    received = receive(lines)
    while True:
        new = {received.get()}
        while not received.empty():
            new.add(received.get())
        if KILLED in new:
            return
        if new - {ENDED}:
            yield
        if ENDED in new:
            return


if __name__ == "__main__":
    # stderr goes to the run's log, which should hold only failures.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    main(RunFolder(Path(sys.argv[1])), sys.stdin)
