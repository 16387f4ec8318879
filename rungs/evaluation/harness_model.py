"""Our models as the `LM` of the lm-evaluation-harness, which must be installed to import this."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM

from rungs.data.text.stop_strings import StopStrings
from rungs.data.text.tokenizer import Tokenizer
from rungs.evaluation.scoring import Continuation, Scorer
from rungs.model.generation import Generator, Request
from rungs.model.sampling import Sampling

_NEW_TOKENS = 256
"""Maximum tokens of an answer if a task doesn't say, as in the harness."""


class RungsLM(TemplateLM):
    """Answers the harness's requests. Stop tokens end an answer."""

    def __init__(
        self,
        scorer: Scorer,
        make_generator: Callable[[], Generator],
        tokenizer: Tokenizer,
        stop_tokens: tuple[int, ...],
    ) -> None:
        super().__init__()
        self._scorer, self._tokenizer, self._stop_tokens = scorer, tokenizer, stop_tokens
        self._make_generator = functools.cache(make_generator)
        self._start_text = tokenizer.decode([self.prefix_token_id])

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_of_answer or 0

    @property
    def prefix_token_id(self) -> int:
        return next(iter(self._tokenizer.begin), self.eot_token_id)

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
        texts = [request.args[0] for request in requests]
        windows = [(index, one) for index, text in enumerate(texts) for one in self._windows(text)]
        totals, missing = [0.0] * len(texts), Counter(index for index, _ in windows)
        for number, score in self._scorer.scores([one for _, one in windows]):
            index = windows[number][0]
            totals[index] += score.log_prob
            missing[index] -= 1
            if not missing[index]:
                self.cache_hook.add_partial("loglikelihood_rolling", (texts[index],), totals[index])
        return totals

    def _windows(self, text: str) -> list[Continuation]:
        """Return the parts of a text, each with as much preceding context as fits."""
        windows = utils.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self._scorer.context_length,
            context_len=1,
        )
        return [Continuation(*utils.make_disjoint_window(one)) for one in windows]

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
        """Return the answers, each cut at the first stop string."""
        until = options.get("until") or []
        stops = StopStrings(self._tokenizer, [until] if isinstance(until, str) else [*until])
        count = options.get("max_gen_toks", _NEW_TOKENS)
        temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        request = Request(count, Sampling(temperature=temperature, stop_tokens=self._stop_tokens))
        generator = self._make_generator()
        room = max(generator.context_length - count, 1)
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        rows: list[list[int]] = [[] for _ in prompts]
        for chunk in generator.stream(prompts, request):
            rows = [row + new for row, new in zip(rows, chunk, strict=True)]
            texts = [self._tokenizer.decode(row, skip_special_tokens=True) for row in rows]
            places = [stops.first(text, row) for text, row in zip(texts, rows, strict=True)]
            if all(place >= 0 for place in places):
                break
        return [
            text if place < 0 else text[:place] for text, place in zip(texts, places, strict=True)
        ]
