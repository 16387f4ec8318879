"""Scores by the lm-evaluation-harness equal those of its Hugging Face backend; see
tests/fixtures/make_harness_scores.py."""

import importlib.util
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from rungs.cli import evaluate
from rungs.common.errors import UserError
from rungs.evaluation import checkpoint_scores, harness
from rungs.evaluation.checkpoint_scores import Measured
from rungs.evaluation.harness import Tasks
from rungs.evaluation.scoring import Continuation, Score, Scorer
from rungs.huggingface.importing import Import, find_source, import_model
from rungs.run.folder import RunFolder
from rungs.run.records import Evaluation
from tests.support.published_models import MODELS

FIXTURES = MODELS.parent / "harness"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs `uv run --extra eval`"
)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    """The tasks, with the paths of their data."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint_scores, "_answers_of", lambda _: tmp_path / "answers")
    folder = tmp_path / "tasks"
    folder.mkdir()
    for path in FIXTURES.glob("*.yaml"):
        data = json.dumps({"data_files": {"test": str(path.with_suffix(".jsonl"))}})
        (folder / path.name).write_text(f"{path.read_text()}dataset_kwargs: {data}\n")
    return Tasks(tuple(EXPECTED), folder, few_shot=None, limit=None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the imported model and its tokenizer."""
    source = shutil.copytree(MODELS / "llama", tmp_path / "llama")
    shutil.copy(FIXTURES / "tokenizer.json", source)
    import_model(Import.from_source(find_source(str(source))), tmp_path / "run")
    return tmp_path / "run"


def by_name(scores: list[Evaluation]) -> dict[str, dict[str, tuple[float, float | None]]]:
    found: dict[str, dict[str, tuple[float, float | None]]] = {task: {} for task in EXPECTED}
    for one in scores:
        found[one.task][one.metric] = one.value, one.standard_error
    return found


@needs_library
def test_scores_are_those_of_the_hugging_face_backend(run: Path, tasks: Tasks) -> None:
    found = by_name(Measured.find(str(run), 4, run).on_tasks(tasks))
    compared = 0
    for task, expected in EXPECTED.items():
        for key, value in expected.items():
            metric = key.removesuffix(",none")
            own = found[task][metric.removesuffix("_stderr")]["_stderr" in metric]
            if "perplexity" in metric or "bits" in metric:
                assert own == pytest.approx(value, rel=2e-4)  # exponentials of about 30
            else:
                assert own == pytest.approx(value, rel=1e-12)
            compared += 1
    assert compared == sum(map(len, EXPECTED.values())) == 12
    lines = RunFolder(run).evaluations.read_text().splitlines()
    assert len(lines) == sum(map(len, found.values()))


@needs_library
def test_an_evaluation_that_was_stopped_goes_on(
    run: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tasks._replace(names=("rungs_choices",))
    scores_of, scored = Scorer.scores, list[int]()

    def until_stopped(
        self: Scorer, continuations: Sequence[Continuation]
    ) -> Iterator[tuple[int, Score]]:
        for number, one in enumerate(scores_of(self, continuations)):
            if not scored and number == 100:
                raise KeyboardInterrupt
            yield one
        scored.append(len(continuations))

    monkeypatch.setattr(Scorer, "scores", until_stopped)
    with pytest.raises(KeyboardInterrupt):
        Measured.find(str(run), 4, run).on_tasks(asked)
    assert not RunFolder(run).evaluations.exists()
    found = by_name(Measured.find(str(run), 4, run).on_tasks(asked))
    assert scored == [60]
    assert found["rungs_choices"]["acc_norm"][0] == EXPECTED["rungs_choices"]["acc_norm,none"]


@needs_library
def test_an_unknown_task_is_named(run: Path, tasks: Tasks) -> None:
    with pytest.raises(UserError, match="no such task: hellaswog; lm-eval ls tasks lists those"):
        Measured.find(str(run), 4, run).on_tasks(tasks._replace(names=("hellaswog",)))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="need the extra eval, which docs"):
        harness.check_installed()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("run", "--choices", "a.jsonl", "--tasks", "x"), "do not go together; choose one"),
        (("run", "--dataset", "d", "--tasks", "x"), "do not go together; choose one"),
        (("run", "--few-shot", "2"), "--task-files and --few-shot are for --tasks"),
    ],
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], problem: str) -> None:
    result = CliRunner().invoke(evaluate.main, list(arguments))
    assert result.exit_code == 2
    assert problem in result.output
