"""Answers to one request: its texts in the engine, their pieces as they arrive up to a stop string,
and the JSON that a client gets."""

import asyncio
import codecs
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from rungs.checkpointing.load import continuation
from rungs.data.text.tokenizer import Tokenizer
from rungs.serving.engine import Delivery, Text
from rungs.serving.protocol import Body, ChatBody, TokenLogProbs
from rungs.serving.served import Served
from rungs.serving.slots import LogProbs

_SECONDS_BETWEEN_LOOKS = 0.5
"""How often to look whether the client is still there."""


class ClientGoneError(Exception):
    """The client has disconnected."""


class FailedError(Exception):
    """The engine could not answer."""


class _Choice:
    """One text of an answer."""

    def __init__(self, served: Served, body: Body, prompt: list[int], index: int) -> None:
        self.index, self._prompt, self._body = index, prompt, body
        self._tokenizer = served.tokenizer
        self._text = AnswerText(served.tokenizer, prompt, body.stops)
        begin = len(served.tokenizer.begin)
        self._added = begin if prompt[:begin] == served.tokenizer.begin else 0
        self._offsets: TokenOffsets | None = None
        if body.likely is not None:
            self._offsets = TokenOffsets(served.tokenizer, [] if body.is_echoed else prompt)
        self._is_begun = False
        self.finish: str | None = None
        self.surplus = 0
        """Tokens shown that turned out to come after a stop string; 0 for most tokenizers, whose
        texts don't change any more."""

    def add(self, delivery: Delivery) -> tuple[str, list[TokenLogProbs] | None]:
        """Add new tokens, and return their text and log-probabilities."""
        is_echo = self._body.is_echoed and not self._is_begun
        self._is_begun = True
        text = self._tokenizer.decode(self._prompt[self._added :]) if is_echo else ""
        before = self.count
        text += self._text.add(delivery.tokens, is_last=delivery.finish is not None)
        self.finish = "stop" if self._text.is_stopped else delivery.finish
        if is_echo:
            return text, self._log_probs(self._prompt, delivery.log_probs, self._added)
        tokens = delivery.tokens[: max(0, self.count - before)]
        self.surplus = max(0, before - self.count)
        if self._body.names_stop_token and not self._text.is_stopped:
            tokens += delivery.stop_token
        return text, self._log_probs(tokens, delivery.log_probs, len(tokens))

    @property
    def count(self) -> int:
        """Number of new tokens so far."""
        return len(self._text.tokens)

    def _log_probs(
        self, tokens: Sequence[int], log_probs: Sequence[LogProbs | None], named_from: int
    ) -> list[TokenLogProbs] | None:
        """Return what clients get for tokens. In the text, special ones have their names from
        `named_from` on."""
        likely = self._body.likely
        if likely is None or self._offsets is None:
            return None
        found = list[TokenLogProbs]()
        for place, token in enumerate(tokens):
            name = self._tokenizer.decode([token]) if place >= named_from else ""
            offset = self._offsets.add(token, name)
            found.append(TokenLogProbs.of(self._tokenizer, token, log_probs[place], likely, offset))
        return found


class Answer:
    """The texts of a request, and what arrives of them.

    Attributes:
        texts: for the engine."""

    def __init__(self, served: Served, body: Body, prompts: list[list[int]]) -> None:
        self._body, self._prompts, self._header = body, prompts, body.header()
        self._arrived: asyncio.Queue[tuple[_Choice, Delivery]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._look_at = 0.0
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
                deliver=self._receiver(choice),
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

    async def whole(self, is_gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """Return the JSON of the finished answer. Raises ClientGoneError, FailedError."""
        texts = [""] * len(self._choices)
        found: list[list[TokenLogProbs]] = [[] for _ in self._choices]
        async for choice, text, log_probs in self._pieces(is_gone):
            texts[choice.index] += text
            found[choice.index] += log_probs or []
        for choice in self._choices:
            del found[choice.index][len(found[choice.index]) - choice.surplus :]
        choices = [
            self._body.choice(texts[n], None if self._body.likely is None else found[n])
            | {"index": n, "finish_reason": choice.finish}
            for n, choice in enumerate(self._choices)
        ]
        return self._begin(*self.texts) | {"choices": choices, "usage": self.usage}

    async def events(self, is_gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON of the answer's pieces. Raises ClientGoneError, FailedError."""
        left_to_begin = set[_Choice]()
        if isinstance(self._body, ChatBody):
            self._header["object"] += ".chunk"
            left_to_begin.update(self._choices)
        options = self._body.stream_options
        usage = {"usage": None} if options and options.include_usage else {}
        async for choice, text, log_probs in self._pieces(is_gone):
            header = self._begin(self.texts[choice.index]) | usage
            if choice in left_to_begin:
                left_to_begin.remove(choice)
                begin = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
                yield header | {"choices": [begin | {"logprobs": None, "finish_reason": None}]}
            if text or log_probs or choice.finish:
                ending = {"index": choice.index, "finish_reason": choice.finish}
                yield header | {"choices": [self._body.piece(text, log_probs) | ending]}
        if usage:
            yield self._begin(*self.texts) | {"choices": [], "usage": self.usage}

    async def _pieces(
        self, is_gone: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[tuple[_Choice, str, list[TokenLogProbs] | None]]:
        """Yield the pieces of all choices as they arrive; whatever ends this, the engine forgets
        the texts."""
        left = set(self._choices)
        try:
            while left:
                choice, delivery = await self._next(is_gone)
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
            self.forget()

    def forget(self) -> None:
        """Tell the engine that nobody waits any more."""
        for text in self.texts:
            text.is_wanted = False

    async def _next(self, is_gone: Callable[[], Awaitable[bool]]) -> tuple[_Choice, Delivery]:
        while True:
            if time.monotonic() >= self._look_at:
                if await is_gone():
                    raise ClientGoneError
                self._look_at = time.monotonic() + _SECONDS_BETWEEN_LOOKS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS_BETWEEN_LOOKS):
                    return await self._arrived.get()

    def _receiver(self, choice: _Choice) -> Callable[[Delivery], None]:
        def deliver(delivery: Delivery) -> None:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (choice, delivery))

        return deliver


def event_lines(value: dict[str, Any]) -> str:
    """Return a server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


class AnswerText:
    """Turns tokens into text that doesn't change later.

    Args:
        prompt: token ids before the answer.
        stops: the answer ends before the one of these strings that is complete first.

    Attributes:
        tokens: those added, up to the one that completes a stop string.
        text: what is certain so far.
        is_stopped: whether a stop string has ended it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._prompt, self._stops = tokenizer, list(prompt), stops
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
        whole = self._whole(self.tokens) if is_last else self._settled()
        if (stop := self._first_stop(whole)) >= 0:
            self.is_stopped, whole = True, whole[:stop]
            while self._first_stop(self._whole(self.tokens[:-1])) >= 0:
                self.tokens.pop()
        elif not is_last:
            whole = whole[: len(whole) - self._open_length(whole)]
        new = whole[len(self.text) :]
        self.text += new
        return new

    def _whole(self, tokens: Sequence[int]) -> str:
        return continuation(self._tokenizer, self._prompt, tokens)

    def _first_stop(self, text: str) -> int:
        """Return where the stop string begins that ends first in a text, -1 if there is none."""
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        return min(found, default=(0, -1))[1]

    def _settled(self) -> str:
        """Return the part of the answer that further tokens can't change."""
        whole = self._tokenizer.decode_settled([*self._prompt, *self.tokens])
        return whole[len(self._before) :] if whole.startswith(self._before) else self.text

    def _open_length(self, text: str) -> int:
        """Return the length of the longest end of a text that begins a stop string."""
        longest = max(map(len, self._stops), default=0)
        ends = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in ends if any(s.startswith(text[-n:]) for s in self._stops)), 0)


class TokenOffsets:
    """Counts the characters of a text before each token. `before` are tokens that come before the
    text; without any that has text, a decoder may drop the first space."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._has_begun = any(map(tokenizer.bytes_of, before))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0
        self._run = b""
        """Byte tokens at the end: if they are not UTF-8, each becomes U+FFFD."""

    def add(self, token: int, name: str) -> int:
        """Return the characters before a token. `name` is what a special token adds."""
        content = self._tokenizer.bytes_of(token)
        if self._tokenizer.is_byte(token):
            self._has_begun = True
            self._run += content
            return self._characters + len(self._run[:-1].decode(errors="ignore"))
        self._characters += _length(self._run)
        offset, self._run = self._characters, b""
        if not self._has_begun and (content or name):
            self._has_begun = True
            if content.startswith(b" "):
                content = self._tokenizer.decode([token]).encode()
        self._characters += len(self._decoder.decode(content) if content else name)
        return offset


def _length(run: bytes) -> int:
    try:
        return len(run.decode())
    except UnicodeDecodeError:
        return len(run)
