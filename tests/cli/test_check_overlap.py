"""`download_dataset.py NAME --check`, and what `evaluate.py` says of it."""

from pathlib import Path

import pytest

from rungs.data import overlap
from rungs.report.comparison_charts import loss_by_step
from rungs.report.run_charts import loss_chart
from rungs.run.recorded_run import RecordedRun
from tests.data.test_overlap import COPIES, make_dataset, words
from tests.support.commands import run_script
from tests.support.document_files import json_lines
from tests.support.tiny_run import make_run


@pytest.fixture
def datasets_dir(tmp_path: Path) -> Path:
    (tmp_path / "datasets").mkdir()
    train = [*(words(20) for _ in range(6)), COPIES[0], COPIES[0]]
    validation = [COPIES[0], *(words(20) for _ in range(3))]
    make_dataset(tmp_path / "datasets" / "d", train, validation)
    return tmp_path / "datasets"


def test_overlap_is_reported_and_kept(datasets_dir: Path) -> None:
    arguments = ("download_dataset.py", "d", "--datasets-dir", datasets_dir)
    assert "13 words" not in run_script(*arguments).stdout
    for extra in (["--check"], []):
        finished = run_script(*arguments, *extra)
        assert finished.returncode == 0, finished.stderr
        assert "12.50% of the training documents came before" in finished.stdout
        assert "validation: 4 documents" in finished.stdout
        assert "25.00% are in training word for word" in finished.stdout
        assert "25.00% of the 4 with 13 words or more share 13 in a row" in finished.stdout


def test_items_of_a_benchmark_are_looked_for(datasets_dir: Path, tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    found = {"question": COPIES[0], "choices": ["yes", "no"]}
    items.write_bytes(json_lines(found, {"question": words(15)}, "a few words"))
    arguments = ("download_dataset.py", "d", "--datasets-dir", datasets_dir, "--items", items)
    finished = run_script(*arguments)
    assert finished.returncode == 0, finished.stderr
    assert "3 items" in finished.stdout
    assert "50.00% of the 2 with 13 words or more" in finished.stdout
    items.write_text("{")
    assert "line 1: malformed JSON" in run_script(*arguments).stderr


@pytest.mark.parametrize(
    ("content", "message"), [("", "has no items"), ("{", "line 1: malformed JSON")]
)
def test_wrong_items_are_refused_before_a_dataset_is_built(
    tmp_path: Path, content: str, message: str
) -> None:
    text, items = tmp_path / "a.txt", tmp_path / "items.jsonl"
    text.write_text("some text. " * 99)
    items.write_text(content)
    options = ("--text", text, "--name", "x", "--vocab-size", 257, "--items", items)
    finished = run_script("download_dataset.py", *options, "--datasets-dir", tmp_path / "d")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith(f"error: {items}: {message}")
    assert len(finished.stderr.splitlines()) == 1
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(("clean", "is_shown"), [(3, True), (200, False)])
def test_an_overlap_above_one_percent_is_mentioned_in_charts_and_by_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: int, is_shown: bool
) -> None:
    validation = [COPIES[0], *(words(14) for _ in range(clean))]
    dataset = make_dataset(tmp_path / "d", [COPIES[0]], validation)
    monkeypatch.setenv("RUNGS_DATASETS_DIR", str(tmp_path))
    assert overlap.notes({"d": dataset.folder}) == []  # not checked yet
    overlap.check(dataset).save(dataset.folder)
    line = "25.0% of the validation documents of d share 13 words in a row with training"
    assert overlap.notes({"d": dataset.folder}) == [line] * is_shown
    run = make_run(tmp_path / "run", dataset="d")
    steps = [{"global_step": n, "train_loss": 2.0 - n} | METRICS for n in range(2)]
    run.metrics.write_bytes(json_lines(*steps))
    recorded = RecordedRun.load(run.path)
    for figure in (loss_chart(recorded), loss_by_step([recorded, recorded])):
        title = figure.legends[0].get_title().get_text()
        assert title == (line if is_shown else "")


METRICS = {
    "tokens_seen": 1,
    "learning_rate": 0.1,
    "gradient_norm": 1.0,
    "clipped": False,
    "dropped_microbatches": 0,
    "step_seconds": 1.0,
    "tokens_per_second": 1.0,
}
