"""Answers to one request: its texts in the engine, their pieces as they arrive up to a stop string,
and the JSON that a client gets."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rungs.checkpointing.load import continuation
from rungs.data.text.stop_strings import StopStrings
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.text.tool_calls import CallReader
from rungs.serving.engine import Delivery, Text
from rungs.serving.protocol import Body, ChatBody, TokenLogProbs
from rungs.serving.served import Served
from rungs.serving.structured import Grammar


class FailedError(Exception):
    """The engine could not answer."""


class _Choice:
    """One text of an answer."""

    def __init__(self, served: Served, body: Body, prompt: list[int], index: int) -> None:
        self.index, self._prompt, self._body = index, prompt, body
        self._tokenizer = served.tokenizer
        self._reader = None
        if isinstance(body, ChatBody) and body.offered and served.call_beginning:
            names = [tool["function"]["name"] for tool in body.offered]
            self._reader = CallReader(served.tokenizer, served.call_beginning, names)
            self._most_calls = None if body.parallel_tool_calls else 1
        self._text = AnswerText(served.tokenizer, prompt, body.stops, self._reader)
        self.calls: list[dict[str, Any]] = []
        self._is_begun = False
        self.finish: str | None = None

    def add(self, delivery: Delivery) -> tuple[str, list[TokenLogProbs] | None]:
        """Add new tokens, and return their text and log-probabilities. With an echo, the prompt
        comes first."""
        is_echo, before = self._body.is_echoed and not self._is_begun, self.count
        self._is_begun = True
        text = self._text.add(delivery.tokens, is_last=delivery.finish is not None)
        self.finish = "stop" if self._text.is_stopped else delivery.finish
        if self._reader and self._reader.calls:
            self.calls = [call.json() for call in self._reader.calls[: self._most_calls]]
            self.finish = "tool_calls" if self.finish == "stop" else self.finish
        tokens = delivery.tokens[: max(0, self.count - before)]
        if self._body.names_stop_token and not self._text.is_stopped:
            tokens += delivery.stop_token
        if is_echo:
            begin = self._tokenizer.begin
            added = len(begin) if self._prompt[: len(begin)] == begin else 0
            text, tokens = self._tokenizer.decode(self._prompt[added:]) + text, self._prompt
        likely = self._body.likely
        if likely is None:
            return text, None
        pairs = zip(tokens, delivery.log_probs, strict=False)  # not those after a stop string
        return text, [
            TokenLogProbs.of(self._tokenizer, token, found, likely) for token, found in pairs
        ]

    @property
    def count(self) -> int:
        """Number of new tokens so far."""
        return len(self._text.tokens)


class Answer:
    """The texts of a request, and what arrives of them. `grammar` is what they may be.

    Attributes:
        texts: for the engine."""

    def __init__(
        self, served: Served, body: Body, prompts: list[list[int]], grammar: Grammar | None = None
    ) -> None:
        self._body, self._prompts, self._header = body, prompts, body.header()
        self._arrived: asyncio.Queue[tuple[_Choice, Delivery]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        sampling, seed = body.sampling(served.stop_tokens), body.own_seed()
        every = [prompt for prompt in prompts for _ in range(body.n)]
        self._choices = [_Choice(served, body, prompt, n) for n, prompt in enumerate(every)]
        self.texts = [
            Text(
                prompt,
                sampling,
                seed,
                number,
                served.new_tokens(body, prompt),
                log_probs=body.likely is not None,
                scores_prompt=body.is_echoed and (body.likely is not None or body.max_tokens == 0),
                deliver=functools.partial(self._deliver, choice),
                grammar=grammar and grammar.copy(),
            )
            for number, (prompt, choice) in enumerate(zip(every, self._choices, strict=True))
        ]

    @property
    def is_streamed(self) -> bool:
        """Whether the client wants pieces as they arrive."""
        return self._body.stream

    @property
    def usage(self) -> dict[str, int]:
        """How many tokens were read and made, as in the JSON of an answer."""
        read, made = sum(map(len, self._prompts)), sum(choice.count for choice in self._choices)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def _begin(self, *texts: Text) -> dict[str, Any]:
        """Return the keys with which a part of the answer begins that is of some of its texts."""
        weights = dict.fromkeys(text.weights for text in texts)
        return self._header | {"system_fingerprint": ", ".join(weights)}

    def _deliver(self, choice: _Choice, delivery: Delivery) -> None:
        """Take new tokens from the engine's thread."""
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, (choice, delivery))

    async def whole(self) -> dict[str, Any]:
        """Return the JSON of the finished answer. Raises FailedError."""
        texts = [""] * len(self._choices)
        found: list[list[TokenLogProbs]] = [[] for _ in self._choices]
        async for choice, text, log_probs in self._pieces():
            texts[choice.index] += text
            found[choice.index] += log_probs or []
        choices = [
            self._body.choice(texts[n], None if self._body.likely is None else found[n])
            | {"index": n, "finish_reason": choice.finish}
            for n, choice in enumerate(self._choices)
        ]
        for n, choice in enumerate(self._choices):
            if choice.calls:
                content = texts[n].strip() or None
                choices[n]["message"] |= {"content": content, "tool_calls": choice.calls}
        return self._begin(*self.texts) | {"choices": choices, "usage": self.usage}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON of the answer's pieces. Raises FailedError."""
        left_to_begin = set[_Choice]()
        if isinstance(self._body, ChatBody):
            self._header["object"] += ".chunk"
            left_to_begin.update(self._choices)
        options = self._body.stream_options
        usage = {"usage": None} if options and options.include_usage else {}
        async for choice, text, log_probs in self._pieces():
            header = self._begin(self.texts[choice.index]) | usage
            if choice in left_to_begin:
                left_to_begin.remove(choice)
                begin = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
                yield header | {"choices": [begin | {"logprobs": None, "finish_reason": None}]}
            if text or log_probs or choice.finish:
                ending = {"index": choice.index, "finish_reason": choice.finish}
                piece = self._body.piece(text, log_probs)
                if choice.calls:
                    calls = [{"index": n} | call for n, call in enumerate(choice.calls)]
                    piece["delta"] |= {"tool_calls": calls}
                yield header | {"choices": [piece | ending]}
        if usage:
            yield self._begin(*self.texts) | {"choices": [], "usage": self.usage}

    async def _pieces(self) -> AsyncIterator[tuple[_Choice, str, list[TokenLogProbs] | None]]:
        """Yield the pieces of all choices as they arrive; whatever ends this, the engine forgets
        the texts."""
        left = set(self._choices)
        try:
            while left:
                choice, delivery = await self._arrived.get()
                if choice not in left:
                    continue
                if delivery.finish == "failed":
                    raise FailedError(delivery.problem)
                text, log_probs = choice.add(delivery)
                if choice.finish:
                    left.discard(choice)
                    self.texts[choice.index].is_wanted = False
                yield choice, text, log_probs
        finally:
            for each in self.texts:
                each.is_wanted = False


def event_lines(value: dict[str, Any]) -> str:
    """Return a server-sent event, in ASCII, as some clients end lines at U+0085 and U+2028, too
    (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    return f"data: {json.dumps(value)}\n\n"


class AnswerText:
    """Turns tokens into text that doesn't change later.

    Args:
        prompt: token ids before the answer.
        stops: the answer ends before the one of these strings that is complete first.
        reader: leaves out calls of tools.

    Attributes:
        tokens: those added, up to the one that completes a stop string.
        text: what is certain so far.
        is_stopped: whether a stop string has ended it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        reader: CallReader | None = None,
    ) -> None:
        self._tokenizer, self._prompt, self._reader = tokenizer, list(prompt), reader
        self._stops = StopStrings(tokenizer, stops)
        self._before = tokenizer.decode(prompt, skip_special_tokens=True)
        self.tokens: list[int] = []
        self.text = ""
        self.is_stopped = False

    def add(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """Add tokens, and return the text that has become certain: without what later tokens may
        change, and what may begin a stop string. `is_last` returns the rest."""
        if self.is_stopped:
            return ""
        self.tokens += tokens
        whole = self._whole(self.tokens)
        if not is_last:  # without what further tokens may change
            settled = self._tokenizer.decode_settled([*self._prompt, *self.tokens])
            is_longer = settled.startswith(self._before)
            whole = settled[len(self._before) :] if is_longer else self.text
        if (stop := self._stops.first(whole, self.tokens)) >= 0:
            self.is_stopped, whole = True, whole[:stop]
            while self._is_complete(self.tokens[:-1]):
                self.tokens.pop()
        elif not is_last:
            whole = self._stops.without_beginning(whole, self.tokens)
        if self._reader:
            whole = self._reader.text_before(whole, self.tokens, is_last or self.is_stopped)
        new = whole[len(self.text) :]
        self.text += new
        return new

    def _whole(self, tokens: Sequence[int]) -> str:
        return continuation(self._tokenizer, self._prompt, tokens)

    def _is_complete(self, tokens: Sequence[int]) -> bool:
        return self._stops.first(self._whole(tokens), tokens) >= 0
