"""The lm-evaluation-harness as a client gets the scores of `evaluate.py`, for texts that fit the
context: others it cuts to one token less than its own backends do."""

import importlib.util
import json
from pathlib import Path

import pytest

from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.evaluation.checkpoint_scores import Measured
from rungs.evaluation.harness import Tasks
from tests.evaluation.test_harness import FIXTURES, run, tasks  # noqa: F401 — fixtures
from tests.serving.test_process import serving

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="needs `uv run --extra eval --with 'lm-eval[api]' --with transformers`",
)
CONTEXT = 64


def keep_what_fits(tasks: Tasks, run: Path, scratch: Path) -> int:  # noqa: F811
    """Leave out questions with a choice that doesn't fit the context; return how many are left."""
    tokenizer = load_tokenizer(run / "checkpoints" / "imported")
    rows = [json.loads(line) for line in (FIXTURES / "choices.jsonl").read_text().splitlines()]
    fitting = [
        row
        for row in rows
        if all(
            len(tokenizer.encode_beginning(f"{row['question']}  {choice}")) <= CONTEXT
            for choice in row["choices"]
        )
    ]
    (scratch / "choices.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in fitting))
    assert tasks.folder
    task = tasks.folder / "choices.yaml"
    task.write_text(task.read_text().replace(str(FIXTURES), str(scratch)))
    return len(fitting)


@needs_library
def test_scores_are_those_of_evaluate(run: Path, tasks: Tasks, tmp_path: Path) -> None:  # noqa: F811
    from lm_eval import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    assert keep_what_fits(tasks, run, tmp_path) >= 10
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
            max_length=CONTEXT + 1,  # it keeps one for a new token
            add_bos_token=True,  # as the tokenizer begins texts
            num_concurrent=4,
        )
        manager = TaskManager(include_path=str(tasks.folder), include_defaults=False)
        found = simple_evaluate(model, tasks=chosen, task_manager=manager, bootstrap_iters=0)
    assert own
    for (task, metric), value in own.items():
        assert found["results"][task][f"{metric},none"] == pytest.approx(value)
