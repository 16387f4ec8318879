"""The program that redraws the charts of a run: `python -m rungs.charts.drawer RUN`.

It reads lines: each asks for the charts, and an empty one says that the run has ended. What is
asked for while it draws is drawn once. If its input ends without the empty line, training was
killed, and it draws no more.
"""

import logging
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue

from rungs.common.errors import RunFailure, UserError, reason
from rungs.run.folder import RunFolder

_ENDED, _KILLED = "\n", ""


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
    received: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_receive, args=(lines, received), daemon=True).start()
    while True:
        new = {received.get()}
        while not received.empty():
            new.add(received.get())
        if _KILLED in new:
            return
        if new - {_ENDED}:
            yield
        if _ENDED in new:
            return


def _receive(lines: Iterable[str], received: SimpleQueue[str]) -> None:
    for line in lines:
        received.put(line)
        if line == _ENDED:
            return
    received.put(_KILLED)


if __name__ == "__main__":
    # What is printed goes to the run's log, where only failures belong.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    main(RunFolder(Path(sys.argv[1]), sys.argv[2]), sys.stdin)
