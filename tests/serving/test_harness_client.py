"""The lm-evaluation-harness as a client gets the scores of `evaluate.py`."""

import importlib.util
from pathlib import Path

import pytest

from rungs.evaluation.checkpoint_scores import Measured
from rungs.evaluation.harness import Tasks
from tests.evaluation.test_harness import run, tasks  # noqa: F401 — fixtures
from tests.serving.test_process import serving

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="needs `uv run --extra eval --with 'lm-eval[api]' --with transformers`",
)


@needs_library
@pytest.mark.xfail(reason="of tasks with texts longer than the context, one answer in 20 differs")
def test_scores_are_those_of_evaluate(run: Path, tasks: Tasks) -> None:  # noqa: F811
    from lm_eval import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    chosen = [name for name in tasks.names if "choice" in name]
    own = {
        (one.task, one.metric): one.value
        for one in Measured.find(str(run), 4, run).on_tasks(tasks)
        if one.task in chosen
    }
    with serving(run) as server:
        model = LocalCompletionsAPI(
            model="run",
            base_url=f"http://127.0.0.1:{server.port}/v1/completions",
            tokenizer=str(run / "checkpoints" / "imported"),
            tokenizer_backend="huggingface",
            max_length=65,  # it keeps one for a new token
            num_concurrent=4,
        )
        manager = TaskManager(include_path=str(tasks.folder), include_defaults=False)
        found = simple_evaluate(model, tasks=chosen, task_manager=manager, bootstrap_iters=0)
    assert own
    for (task, metric), value in own.items():
        assert found["results"][task][f"{metric},none"] == pytest.approx(value)
