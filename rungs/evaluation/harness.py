"""Tasks of EleutherAI's lm-evaluation-harness: our models as its `LM`.

Scores are what the harness's own Hugging Face backend gives for the exported model. Answers are
kept in a database as they arrive, so an evaluation that was stopped goes on where it was.
https://github.com/EleutherAI/lm-evaluation-harness
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rungs.common.errors import UserError
from rungs.data.tokenizer import Tokenizer
from rungs.evaluation.scoring import Continuation, Scorer
from rungs.model.generation import Generator, Request
from rungs.model.sampling import Sampling

_NEW_TOKENS = 256
"""Of an answer, if a task doesn't say; as in the harness."""


class TaskScore(NamedTuple):
    """A metric of a task."""

    task: str
    metric: str
    """With the filter that the answers went through, as in `exact_match,strict-match`."""
    value: float
    standard_error: float | None
    items: int
    few_shot: int


class Tasks(NamedTuple):
    """Which tasks to evaluate."""

    names: tuple[str, ...]
    folder: Path | None
    """With tasks of the user's own, in YAML."""
    few_shot: int | None
    """Examples before each question; None for the task's own number."""
    limit: int | None
    """Items of each task at most."""


def check_installed() -> None:
    """Raise UserError if the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "--tasks needs the extra eval, which docs/installation.md says how to add; without it,"
            " --choices takes a file of items"
        )


def evaluate(
    tasks: Tasks, scorer: Scorer, generator: Generator, tokenizer: Tokenizer, answers: Path
) -> list[TaskScore]:
    """Return the scores of a model.

    Args:
        answers: the database of the answers of this model.

    Raises:
        UserError: there is no such task, or its data cannot be loaded.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks.folder) if tasks.folder else None)
    if unknown := [name for name in tasks.names if name not in manager.all_tasks]:
        raise UserError(
            f"--tasks: no such task: {', '.join(unknown)}; lm-eval ls tasks lists them;"
            " --task-files names a folder with your own"
        )
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its bootstrap would fork, which JAX can't
    try:
        found = lm_eval.simple_evaluate(
            _language_model()(scorer, generator, tokenizer),
            tasks=[*tasks.names],
            num_fewshot=tasks.few_shot,
            limit=tasks.limit,
            task_manager=manager,
            use_cache=str(answers),
            log_samples=False,
        )
    except (OSError, ConnectionError, ValueError) as error:
        raise UserError(f"--tasks: {error}") from None
    return [
        score
        for name, metrics in found["results"].items()
        for score in _scores(name, metrics, found)
    ]


def _scores(name: str, metrics: dict[str, Any], found: Any) -> list[TaskScore]:
    """Return the metrics of a task, or of a group of tasks."""
    items = found["n-samples"].get(name, {}).get("effective", 0)
    few_shot = found["n-shot"].get(name, 0)
    values = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    return [
        TaskScore(name, _plain(key), value, _error(metrics, key), items, few_shot)
        for key, value in values.items()
        if "," in key and "_stderr," not in key
    ]


def _plain(key: str) -> str:
    return key.removesuffix(",none")


def _error(metrics: dict[str, Any], key: str) -> float | None:
    metric, _, answer_filter = key.partition(",")
    error = metrics.get(f"{metric}_stderr,{answer_filter}")
    return float(error) if isinstance(error, int | float) else None


def _language_model() -> Any:
    """Return the class; only this needs the harness."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

    class RungsLM(TemplateLM):
        """Answers the harness's requests."""

        def __init__(self, scorer: Scorer, generator: Generator, tokenizer: Tokenizer) -> None:
            super().__init__()
            self._scorer, self._generator, self._tokenizer = scorer, generator, tokenizer
            self._start_text = tokenizer.decode([self.prefix_token_id])

        @property
        def eot_token_id(self) -> int:
            return self._tokenizer.end_of_text or 0

        @property
        def prefix_token_id(self) -> int:
            return next(iter(self._tokenizer.encode_prompt("")), self.eot_token_id)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            if add_special_tokens is False or string.startswith(self._start_text):
                return self._tokenizer.encode(string)
            return self._tokenizer.encode_prompt(string)

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            continuations = [Continuation(context, tokens) for _, context, tokens in requests]
            answers: list[Any] = [None] * len(requests)
            for index, score in self._scorer.scores(continuations):
                answers[index] = tuple(score)
                if texts := requests[index][0]:
                    self.cache_hook.add_partial("loglikelihood", texts, answers[index])
            return answers

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            return [self._rolling(*request.args) for request in requests]

        def _rolling(self, text: str) -> float:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._scorer.context_length,
                context_len=1,
            )
            continuations = [Continuation(*utils.make_disjoint_window(one)) for one in windows]
            total = sum(score.log_prob for _, score in self._scorer.scores(continuations))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            return total

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            texts: list[str] = [""] * len(requests)
            by_options: dict[str, list[int]] = {}
            for index, request in enumerate(requests):
                by_options.setdefault(repr(request.args[1]), []).append(index)
            for indices in by_options.values():
                size = self._scorer.batch_size
                for first in range(0, len(indices), size):
                    chosen = indices[first : first + size]
                    asked = [requests[index].args for index in chosen]
                    found = self._generate([context for context, _ in asked], asked[0][1])
                    for index, args, text in zip(chosen, asked, found, strict=True):
                        texts[index] = text
                        self.cache_hook.add_partial("generate_until", args, text)
            return texts

        def _generate(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
            """Return the answers, each up to the first of the texts that end it."""
            until = options.get("until") or []
            ends = [until] if isinstance(until, str) else [*until]
            count = options.get("max_gen_toks", _NEW_TOKENS)
            temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
            stops = (self.eot_token_id,)
            request = Request(count, Sampling(temperature=temperature, stop_tokens=stops))
            room = self._generator.context_length - count
            prompts = [self.tok_encode(context)[-room:] for context in contexts]
            rows: list[list[int]] = [[] for _ in prompts]
            for chunk in self._generator.stream(prompts, request):
                rows = [row + new for row, new in zip(rows, chunk, strict=True)]
                texts = [self._tokenizer.decode(row, skip_special_tokens=True) for row in rows]
                if all(any(end in text for end in ends) for text in texts):
                    break
            return [
                _before(self._tokenizer.decode(row, skip_special_tokens=True), ends) for row in rows
            ]

    return RungsLM


def _before(text: str, ends: list[str]) -> str:
    """Return the text before the first of its ends."""
    for end in ends:
        if end:
            text = text.split(end)[0]
    return text
