"""Read back what the trackers stored."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7


def tensorboard_scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def mlflow_scalars(name: str) -> list[tuple[int, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    [experiment] = [e for e in client.search_experiments() if e.name == "rungs"]
    [run] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, name)
    return sorted((metric.step, metric.value) for metric in history)


def trackio_scalars(name: str) -> list[tuple[int, float]]:
    rows, _ = trackio_run()
    return sorted((row["step"], row[name]) for row in rows if name in row)


def trackio_run() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rows and config of the only run. Trackio chooses its folder when it is imported, so
    another process reads it."""
    program = """
import json
from trackio import SQLiteStorage as storage
[run] = storage.get_runs("rungs")
print(json.dumps([storage.get_logs("rungs", run), storage.get_run_config("rungs", run)]))
"""
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    rows, config = json.loads(output.splitlines()[-1])
    return rows, config


def wandb_scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return a metric from the files of all starts, which must be of one run."""
    rows, ids = [], set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        ids.add(path.stem)
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "history":
                items = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                if name in items:
                    rows.append((record.history.step.num or items["_step"], items[name]))
    assert len(ids) == 1
    return rows


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a file in LevelDB's log format, after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    content, place, parts = path.read_bytes(), _HEADER, []
    while place + _HEADER <= len(content):
        if (left := _BLOCK - place % _BLOCK) < _HEADER:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        parts.append(content[place + _HEADER : place + _HEADER + size])
        place += _HEADER + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record
