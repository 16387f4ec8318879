"""Tasks of https://github.com/EleutherAI/lm-evaluation-harness. Scores equal those of its Hugging
Face backend for the exported model. Answers are stored as they arrive, so an interrupted evaluation
continues where it was."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rungs.common.errors import UserError, errors_at
from rungs.data.text.tokenizer import Tokenizer
from rungs.evaluation.scoring import Scorer
from rungs.model.generation import Generator


class TaskScore(NamedTuple):
    """A metric of a task."""

    task: str
    metric: str
    """Metric and answer filter, as in `exact_match,strict-match`."""
    value: float
    standard_error: float | None
    items: int
    few_shot: int


class Tasks(NamedTuple):
    """Which tasks to evaluate."""

    names: tuple[str, ...]
    folder: Path | None
    """Folder with tasks of the user's own, in YAML."""
    few_shot: int | None
    """Examples before each question; None for the task's default."""
    limit: int | None
    """Maximum items per task."""


def check_installed() -> None:
    """Raise UserError if the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "tasks of the lm-evaluation-harness need the extra eval, which docs/installation.md"
            " says how to add; without it, a file of multiple-choice items can be measured"
        )


def check_tasks(tasks: Tasks) -> Any:
    """Return the harness's `TaskManager`. Raises UserError if a task does not exist."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks.folder) if tasks.folder else None)
    if unknown := [name for name in tasks.names if name not in manager.all_tasks]:
        raise UserError(
            f"no such task: {', '.join(unknown)}; lm-eval ls tasks lists those of the harness, and"
            " a folder with your own can be named"
        )
    return manager


def evaluate(
    tasks: Tasks,
    scorer: Scorer,
    make_generator: Callable[[], Generator],
    tokenizer: Tokenizer,
    stop_tokens: tuple[int, ...],
    answers: Path,
) -> list[TaskScore]:
    """Return the scores of a model. `make_generator` is called if a task asks for generated
    answers, which `stop_tokens` end; `answers` is the database of this model's answers. Raises
    UserError if a task does not exist or its data cannot be loaded."""
    import lm_eval

    from rungs.evaluation.harness_model import RungsLM

    manager = check_tasks(tasks)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its bootstrap would fork, unsafe with JAX
    with errors_at("--tasks: ", OSError, ConnectionError, ValueError):
        found = lm_eval.simple_evaluate(
            RungsLM(scorer, make_generator, tokenizer, stop_tokens),
            tasks=[*tasks.names],
            num_fewshot=tasks.few_shot,
            limit=tasks.limit,
            task_manager=manager,
            use_cache=str(answers),
            log_samples=False,
        )
    results = found["results"].items()
    return [score for name, metrics in results for score in _scores(name, metrics, found)]


def _scores(name: str, metrics: dict[str, Any], found: Any) -> list[TaskScore]:
    """Return the metrics of a task or a group of tasks."""
    items = found["n-samples"].get(name, {}).get("effective", 0)
    few_shot = found["n-shot"].get(name, 0)
    values = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    scores = []
    for key, value in values.items():
        if "," in key and "_stderr," not in key:
            error = values.get(key.replace(",", "_stderr,", 1))
            error = None if error is None else float(error)
            scores.append(TaskScore(name, key.removesuffix(",none"), value, error, items, few_shot))
    return scores
