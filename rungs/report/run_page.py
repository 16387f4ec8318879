"""The page of runs: as one file, or on 127.0.0.1 with new steps as runs train (`charts.py RUN…
--watch`)."""

import json
import os
import re
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click

from rungs.common.errors import UserError, reason
from rungs.common.helper_process import process_executor
from rungs.config import run_config
from rungs.report import page_file
from rungs.report.page_data import NOT_DRAWN, ShownRun
from rungs.run import recorded_run
from rungs.run.folder import RunFolder
from rungs.run.step_table import StepTable

SCRIPTS = (
    *("theme", "tables", "curves", "chart", "charts", "readout", "run_list", "results"),
    *("lineage", "events", "samples", "heat_map", "layers", "watch", "main"),
)
"""Scripts in order of execution, after uPlot."""
_DATA_BYTES = 2_400_000
"""Most base64 for the steps and layers of all runs, which keeps the page below 3 MB."""
_LAYERS_BYTES = 600_000
"""Part of that for the layers of all runs that have them."""
_BYTES_OF_NUMBER = 16 / 3
"""Size of a float32 in base64."""
_MOST_ROWS = 20_000
"""Most steps of a run."""
HOST = "127.0.0.1"
_SINCE = re.compile(r"since=([0-9]{1,15})")
_SECONDS_OF_SILENCE = 60.0
"""Idle time after which a connection is closed."""


def open_runs(folders: Sequence[Path]) -> list[ShownRun]:
    """Read the runs in these folders. Folders with the same name are shown by path. Raises
    UserError with a line for each error in their configs."""
    configs = [run_config.load_any_run(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    runs = [
        ShownRun(
            str(folder) if names.count(name) > 1 else name,
            RunFolder(folder),
            config,
            StepTable(folder / "metrics.jsonl"),
        )
        for folder, name, config in zip(folders, names, configs, strict=True)
    ]
    # Importing JAX to count parameters takes seconds; this process reads metrics meanwhile.
    with process_executor() as counter:
        counted = counter.submit(_flops_per_token, configs)
        for run in runs:
            run.refresh()
        for run, flops in zip(runs, counted.result(), strict=True):
            run.flops_per_token = flops
    return runs


def _flops_per_token(configs: Sequence[run_config.AnyRunConfig]) -> list[float]:
    os.environ["JAX_PLATFORMS"] = "cpu"

    from rungs.planning.flops import model_flops_per_token
    from rungs.step.state import shapes_of

    known: dict[str, float] = {}  # compared runs are mostly alike
    found = []
    for config in configs:
        model, lora, length = config.model, config.train.lora, config.sequence_length
        if (key := f"{model!r} {lora!r} {length}") not in known:
            known[key] = model_flops_per_token(shapes_of(model, lora), model, length)
        found.append(known[key])
    return found


def page_data(
    runs: Sequence[ShownRun], included: Sequence[ShownRun], version: int | None = None
) -> str:
    """Return the page's data on the `included` runs as JSON; all `runs` share the page's bytes.
    `version` numbers the runs' state, for requesting later steps, or is None."""
    columns = sum(len(run.steps.columns) for run in runs)
    watched = sum(run.folder.layers.exists() for run in runs)
    steps_bytes = _DATA_BYTES - _LAYERS_BYTES * bool(watched)
    rows = min(_MOST_ROWS, int(steps_bytes / _BYTES_OF_NUMBER / max(columns, 1)))
    layers_bytes = _LAYERS_BYTES // max(watched, 1)
    return json.dumps(
        {
            "version": version,
            "notDrawn": sorted(NOT_DRAWN),
            "runs": [run.as_json(rows, layers_bytes) for run in included],
            "differences": recorded_run.differing_keys({run.name: run.config for run in runs}),
            "caution": _caution(runs),
        },
        allow_nan=False,
    )


def _caution(runs: Sequence[ShownRun]) -> str | None:
    """Return a caution about comparing the runs, or None."""
    if not recorded_run.use_different_datasets([run.config for run in runs]):
        return None
    return recorded_run.DIFFERENT_DATASETS


def page(runs: Sequence[ShownRun], version: int | None = None) -> str:
    """Return the page as HTML. With a `version`, as in `page_data`, it asks for later steps."""
    return page_file.assemble(
        "page.html",
        styles=("uPlot.min.css", "page.css"),
        scripts=SCRIPTS,
        data=page_data(runs, runs, version),
        library=f"/*\n{page_file.asset('uPlot-LICENSE.txt')}*/\n"
        + page_file.asset("uPlot.iife.min.js"),
        connects=version is not None,
    )


def write_page(path: Path, runs: Sequence[ShownRun]) -> None:
    """Write the page atomically; raises RunFailure."""
    page_file.write(path, page(runs))


class PageServer(ThreadingHTTPServer):
    """Serves the page of some runs to this machine only, at a port, or a free one if that is 0. A
    page that asks for changes gets runs with new steps. Raises UserError if the port is taken."""

    def __init__(self, runs: Sequence[ShownRun], port: int = 0) -> None:
        self._runs, self._lock = runs, threading.Lock()
        self._version = 0
        self._changed_at = dict.fromkeys((run.name for run in runs), 0)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror}; choose another") from None

    @property
    def address(self) -> str:
        """URL to open in a browser."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def hosts(self) -> set[str]:
        """Accepted Host headers; other sites may point their own name at this machine."""
        return {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def handle_error(self, *_: object) -> None:
        """Print one line, or nothing if the browser has disconnected."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, ConnectionError | TimeoutError):
            click.echo(f"the page was not sent: {reason(error)}", err=True)

    def whole_page(self) -> str:
        """Return the page with the steps so far."""
        with self._lock:
            self._refresh()
            return page(self._runs, version=self._version)

    def changes(self, since: int) -> str:
        """Return the runs that have changed since a version, as JSON."""
        with self._lock:
            self._refresh()
            changed = [run for run in self._runs if self._changed_at[run.name] > since]
            return page_data(self._runs, changed, version=self._version)

    def _refresh(self) -> None:
        changed = [run for run in self._runs if run.refresh()]
        self._version += bool(changed)
        self._changed_at |= dict.fromkeys((run.name for run in changed), self._version)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _SECONDS_OF_SILENCE

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        since = _SINCE.fullmatch(query)
        if self.headers.get("Host") not in self.server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif path == "/":
            self._answer(self.server.whole_page(), "text/html")
        elif path == "/changes":
            changes = self.server.changes(int(since[1]) if since else 0)
            self._answer(changes, "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, text: str, kind: str) -> None:
        content = text.encode(errors="replace")  # lone surrogates in file names
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log no requests."""
