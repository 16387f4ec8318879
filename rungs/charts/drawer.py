"""The program that redraws the charts of a run: `python -m rungs.charts.drawer RUN`. Each line that
it reads asks for the charts; what is asked for while it draws is drawn once. An empty line says
that the run has ended. Without it, training was killed, and nothing more is drawn."""

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from rungs.common.errors import RunFailure, UserError, reason
from rungs.common.helper_process import ENDED, KILLED, receive
from rungs.run.folder import RunFolder


def main(run: RunFolder, lines: Iterable[str]) -> None:
    """Draw the charts of a run whenever that is asked for."""
    for _ in _requests(lines):
        try:
            # here, because this import may fail or warn
            from rungs.charts.run_charts import draw_run

            run.check()
            draw_run(run.path)
        except Exception as error:  # the next drawing may work
            kind = "" if isinstance(error, UserError | RunFailure) else f"{type(error).__name__}: "
            print(f"not drawn: {kind}{reason(error)}", file=sys.stderr, flush=True)


def _requests(lines: Iterable[str]) -> Iterator[None]:
    """Yield once for all requests that have come by then."""
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
    # What is printed goes to the run's log, where only failures belong.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    main(RunFolder(Path(sys.argv[1]), sys.argv[2]), sys.stdin)
