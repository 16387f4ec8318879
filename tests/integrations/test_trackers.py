"""Each tracker with its own library, without a network; what it stored is read back."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.integrations.trackers import BUILT_IN
from rungs.integrations.tracking_feed import Feed
from rungs.run import metrics
from rungs.run.folder import RunFolder
from tests.integrations import stores
from tests.support.recorded_runs import step
from tests.support.tiny_run import command, make_dataset, make_run, train


@pytest.fixture(params=sorted(BUILT_IN))
def tracker(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(BUILT_IN[name][0], reason=f"needs `uv run --extra {name}`")
    if name == "tensorboard":
        pytest.importorskip("tensorboard", reason="needs `uv run --with tensorboard`")
    return name


def scalars(tracker: str, run: RunFolder, folder: Path, name: str) -> list[tuple[int, float]]:
    """Return a metric from the store of a tracker."""
    if tracker == "tensorboard":
        return stores.tensorboard_scalars(run.trackers / "tensorboard", name)
    if tracker == "wandb":
        return stores.wandb_scalars(folder, name)
    return (stores.mlflow_scalars if tracker == "mlflow" else stores.trackio_scalars)(name)


def expected(steps: range) -> list[tuple[int, Any]]:
    return [(number, pytest.approx(2 + 1 / (number + 1))) for number in steps]


def feed(run: RunFolder, tracker: str) -> None:
    """Send a run in a process of its own, as training does."""
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "rungs.integrations.tracking_feed",
            str(run.path),
            tracker,
        ],
        input="new\n\n",
        text=True,
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_it_has_each_step_once_also_after_more_starts(
    tracker: str, recorded: RunFolder, local_stores: Path
) -> None:
    feed(recorded, tracker)
    stored = {path for path in local_stores.rglob("*") if path.suffix == ".wandb"}
    feed(recorded, tracker)  # nothing is new
    assert {path for path in local_stores.rglob("*") if path.suffix == ".wandb"} == stored
    with recorded.metrics.open("a") as file:
        file.writelines(json.dumps(step(number)) + "\n" for number in range(30, 40))
    feed(recorded, tracker)
    assert scalars(tracker, recorded, local_stores, "train_loss") == expected(range(40))


def test_steps_that_are_taken_again_are_not_sent_again(
    tracker: str, recorded: RunFolder, local_stores: Path
) -> None:
    """After a kill, training goes back to its last checkpoint."""
    feed(recorded, tracker)
    lines = recorded.metrics.read_text().splitlines(keepends=True)
    recorded.metrics.write_text("".join(lines[:20]))
    feed(recorded, tracker)
    recorded.metrics.write_text("".join(json.dumps(step(number)) + "\n" for number in range(35)))
    feed(recorded, tracker)
    assert scalars(tracker, recorded, local_stores, "train_loss") == expected(range(35))


def test_what_was_sent_counts_even_if_that_was_not_written_down(
    tracker: str, recorded: RunFolder, local_stores: Path
) -> None:
    """A machine that is lost between a batch and the note of it."""
    feed(recorded, tracker)
    note = recorded.trackers / tracker / "sent.json"
    if tracker == "wandb":
        pytest.skip("without a network, W&B doesn't say what it has")
    note.write_text(json.dumps(json.loads(note.read_text()) | {"last_step": 10}))
    feed(recorded, tracker)
    assert scalars(tracker, recorded, local_stores, "train_loss") == expected(range(30))


def train_to_the_end(run: RunFolder, datasets_dir: Path) -> None:
    """End the run. On a busy machine what killed starts still send may leave some to the next."""
    for _ in range(3):
        result = train(run, datasets_dir)
        assert result.returncode == 0
        if "the next start sends it" not in result.stderr:
            return


@pytest.mark.long
@pytest.mark.parametrize("tracker", ["tensorboard"], indirect=True)
def test_a_killed_run_continues_in_the_same_run(
    tracker: str, local_stores: Path, tmp_path: Path
) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "killed", trackers=[tracker])
    process = subprocess.Popen(command(run, tmp_path / "datasets"), stderr=subprocess.DEVNULL)
    while not any(one.step >= 10 for one in list_checkpoints(run.checkpoints)):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    train_to_the_end(run, tmp_path / "datasets")
    recorded = [(one.global_step, one.train_loss) for one in metrics.read(run.metrics)]
    found = scalars(tracker, run, local_stores, "train_loss")
    assert found == [(number, pytest.approx(loss)) for number, loss in recorded]
    validations = scalars(tracker, run, local_stores, "validation_loss")
    assert [number for number, _ in validations] == [0, 5, 10, 15, 20, 23]


class TestOtherThings:
    """Config, samples, charts, scores."""

    def test_tensorboard(self, recorded: RunFolder) -> None:
        pytest.importorskip("tensorboardX", reason="needs `uv run --extra tensorboard`")
        accumulator = pytest.importorskip(
            "tensorboard.backend.event_processing.event_accumulator"
        ).EventAccumulator
        feed(recorded, "tensorboard")
        events = accumulator(str(recorded.trackers / "tensorboard"))
        events.Reload()
        texts = {
            tag: [e.tensor_proto.string_val[0].decode() for e in events.Tensors(tag)]
            for tag in events.Tags()["tensors"]
        }
        assert '| train.lineage | `{"like": "runs/other"' in texts["config/text_summary"][0]
        assert "upon a time" in texts["samples/greedy: Once/text_summary"][0]
        assert "| quiz acc | 0.5 |" in texts["final figures/text_summary"][0]
        assert events.Tags()["images"] == ["loss-chart"]

    def test_mlflow(self, recorded: RunFolder, local_stores: Path) -> None:
        pytest.importorskip("mlflow", reason="needs `uv run --extra mlflow`")
        from mlflow.tracking import MlflowClient

        feed(recorded, "mlflow")
        client = MlflowClient()
        [experiment] = [e for e in client.search_experiments() if e.name == "rungs"]
        [run] = client.search_runs([experiment.experiment_id])
        assert run.data.params["train.learning_rate"] == "0.01"
        assert "runs/other" in run.data.params["train.lineage"]
        assert run.info.status == "FINISHED"
        assert {one.path for one in client.list_artifacts(run.info.run_id)} == {
            "charts",
            "samples",
            "final-figures.json",
        }
        [path] = local_stores.rglob("final-figures.json")
        assert json.loads(path.read_text())["quiz acc"] == 0.5

    @pytest.mark.usefixtures("local_stores")
    def test_trackio(self, recorded: RunFolder) -> None:
        pytest.importorskip("trackio", reason="needs `uv run --extra trackio`")
        feed(recorded, "trackio")
        rows, config = stores.trackio_run()
        assert [row["sample greedy: Once"] for row in rows if "sample greedy: Once" in row] == [
            " upon a time"
        ]
        assert any(row.get("final quiz acc") == 0.5 for row in rows)
        assert any("loss-chart" in row for row in rows)
        assert config["train.lineage"]["like"] == "runs/other"

    def test_wandb(self, recorded: RunFolder, local_stores: Path) -> None:
        pytest.importorskip("wandb", reason="needs `uv run --extra wandb`")
        feed(recorded, "wandb")
        [path] = local_stores.glob("wandb/offline-run-*/*.wandb")
        records = list(stores.wandb_records(path))
        config = {
            update.key: json.loads(update.value_json)
            for record in records
            if record.WhichOneof("record_type") == "run"
            for update in record.run.config.update
        }
        assert config["train.lineage"]["like"] == "runs/other"
        history = [
            "/".join(item.nested_key) or item.key
            for record in records
            if record.WhichOneof("record_type") == "history"
            for item in record.history.item
        ]
        assert any(name.startswith("samples/10") for name in history), set(history)
        assert any(name.startswith("charts/loss-chart") for name in history)
        summary = [
            update.key or "/".join(update.nested_key)
            for record in records
            if record.WhichOneof("record_type") == "summary"
            for update in record.summary.update
        ]
        assert "quiz acc" in summary


def test_a_late_validation_is_added_to_its_step(recorded: RunFolder) -> None:
    """A signal interrupted the validation of the last step; the next start repeats it."""
    sent: list[tuple[int, dict[str, float]]] = []
    tracker = FakeTracker(sent)
    (recorded.trackers / "fake").mkdir(parents=True)
    Feed(recorded, "fake", lambda _: tracker).send_new()
    lines = recorded.metrics.read_text().splitlines(keepends=True)
    lines[-1] = json.dumps(step(29, validation_loss=1.25)) + "\n"
    recorded.metrics.write_text("".join(lines))
    Feed(recorded, "fake", lambda _: tracker).send_new()
    assert [number for number, _ in sent] == [*range(30), 29]
    assert sent[-1] == (29, {"validation_loss": 1.25})


class FakeTracker:
    def __init__(self, sent: list[tuple[int, dict[str, float]]]) -> None:
        self._sent = sent

    def last_step(self) -> int:
        return self._sent[-1][0] if self._sent else -1

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._sent.append((step, dict(metrics)))

    def log_samples(self, *_: object) -> None: ...

    def log_chart(self, *_: object) -> None: ...

    def flush(self) -> None: ...

    def finish(self, *_: object) -> None: ...
