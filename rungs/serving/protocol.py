"""What clients may ask for, and the form of answers: OpenAI's completions and chat completions
(https://platform.openai.com/docs/api-reference), with the sampling settings that vLLM adds
(`top_k`, `min_p`, `repetition_penalty`, `ignore_eos`). What isn't supported is refused by name."""

import abc
import secrets
import time
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import pydantic
from pydantic import Field

from rungs.common.errors import UserError, did_you_mean
from rungs.config.option_values import NEW_TOKENS
from rungs.data.text.messages import TOOL_CALLS, Message, messages_of
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.text.tool_calls import with_objects
from rungs.model.sampling import Sampling
from rungs.serving.slots import MOST_LIKELY, LogProbs

MOST_STOPS, MOST_STOP_CHARACTERS = 4, 1000
"""Each piece of an answer is compared with all beginnings of its stop strings."""
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Parameters that don't bear on the answer."""
_ONLY: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
}
"""Parameters that aren't supported, with the values, besides null, that ask for nothing."""
_Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]


class StreamOptions(pydantic.BaseModel):
    """Options of a streamed answer."""

    model_config = pydantic.ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class Body(pydantic.BaseModel, abc.ABC):
    """What both kinds of request have."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    kind: ClassVar[str]
    """The `object` of an answer."""
    id_prefix: ClassVar[str]
    """How the `id` of an answer begins."""
    usual_tokens: ClassVar[int | None] = None
    """The most new tokens if the client doesn't say how many; None for as many as fit."""

    names_stop_token: ClassVar[bool] = False
    """Whether log-probabilities have the token that ends a text, too."""

    model: str
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_others(cls, values: Any) -> Any:
        """Leave out parameters that ask for nothing. Raises ValueError for unsupported ones."""
        if not isinstance(values, dict):
            raise ValueError("must be an object")
        kept = {key: value for key, value in values.items() if value is not None}
        for name in {*_IGNORED} & kept.keys() - cls.model_fields.keys():
            del kept[name]
        for name in sorted(_ONLY.keys() & kept.keys() - cls.model_fields.keys()):
            if kept.pop(name) not in _ONLY[name]:
                raise ValueError(f"{name} is not supported; leave it out")
        for name in kept.keys() - cls.model_fields.keys():
            hint = did_you_mean(name, cls.model_fields, "leave it out")
            raise ValueError(f"unknown parameter {name}; {hint}")
        return kept

    @property
    def asked_tokens(self) -> int | None:
        """The most new tokens that the client asked for."""
        return self.max_tokens

    @property
    @abc.abstractmethod
    def likely(self) -> int | None:
        """How many likely tokens to give in each place; None for no log-probabilities."""

    @property
    def is_echoed(self) -> bool:
        """Whether answers begin with the prompt."""
        return False

    @abc.abstractmethod
    def choice(self, text: str, log_probs: "list[TokenLogProbs] | None") -> dict[str, Any]:
        """Return the part of a choice that holds its text."""

    def piece(self, text: str, log_probs: "list[TokenLogProbs] | None") -> dict[str, Any]:
        """The same for a piece of a stream."""
        return self.choice(text, log_probs)

    def header(self) -> dict[str, Any]:
        """Return the keys with which all parts of one answer begin."""
        return {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.kind,
            "created": int(time.time()),
            "model": self.model,
        }

    @property
    def stops(self) -> list[str]:
        """Strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(self, stop_tokens: tuple[int, ...]) -> Sampling:
        """Return the sampling settings. Raises UserError if one is out of range."""
        top_k = None if self.top_k in (None, 0, -1) else self.top_k
        settings = Sampling(
            self.repetition_penalty,
            self.temperature,
            top_k,
            None if self.top_p == 1 else self.top_p,
            self.min_p or None,
            () if self.ignore_eos else stop_tokens,
        )
        settings.check()
        return settings

    def own_seed(self) -> int:
        """Return the seed, a random one if none is given."""
        return secrets.randbits(32) if self.seed is None else self.seed % 2**32


Tokens = list[Annotated[int, Field(ge=0)]]


class CompletionBody(Body):
    """`/v1/completions`."""

    kind, id_prefix = "text_completion", "cmpl"
    usual_tokens = NEW_TOKENS
    names_stop_token = True
    prompt: str | Tokens | list[str] | list[Tokens]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELY)] | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """Return each prompt, a text or token ids. Raises UserError if there is none."""
        each = self.prompt
        if isinstance(each, str) or (each and isinstance(each[0], int)):
            return [each]  # type: ignore[return-value]
        if not each:
            raise UserError("prompt: is an empty list")
        return each  # type: ignore[return-value]

    @property
    def likely(self) -> int | None:
        return self.logprobs

    @property
    def is_echoed(self) -> bool:
        return self.echo

    def choice(self, text: str, log_probs: "list[TokenLogProbs] | None") -> dict[str, Any]:
        found = None
        if log_probs is not None:
            likely = [
                # of several with one text the most likely, which comes first
                None if it.top is None else {name: value for name, value, _ in reversed(it.top)}
                for it in log_probs
            ]
            found = {
                "tokens": [it.name for it in log_probs],
                "token_logprobs": [it.log_prob for it in log_probs],
                "top_logprobs": likely if self.logprobs else None,
            }
        return {"text": text, "logprobs": found}


class ChatBody(Body):
    """`/v1/chat/completions`."""

    kind, id_prefix = "chat.completion", "chatcmpl"
    messages: list[dict[str, Any]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELY)] | None = None

    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] = {"type": "text"}

    @pydantic.field_validator("tools")
    @classmethod
    def _are_functions(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for tool in tools:
            function = tool.get("function")
            is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
            if tool.get("type") != "function" or not is_named:
                raise ValueError('each must be {"type": "function", "function": {"name": …}}')
        return tools

    def conversation(self) -> list[Message]:
        """Return the messages. Raises ValueError if they aren't messages."""
        return messages_of([with_objects(it) if it.get(TOOL_CALLS) else it for it in self.messages])

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools that an answer may call."""
        return self.tools if self.tool_choice == "auto" else []

    @property
    def schema_rules(self) -> dict[str, Any] | None:
        """The JSON schema of an answer; None for any text. Raises UserError."""
        form = self.response_format
        if form == {"type": "text"}:
            return None
        if self.offered or self.ignore_eos:
            other = "tools" if self.offered else "ignore_eos"
            raise UserError(f"response_format: not together with {other}; leave one of them out")
        kind, named = form.get("type"), form.get("json_schema")
        rules = named.get("schema") if kind == "json_schema" and isinstance(named, dict) else None
        rules = {"type": "object"} if kind == "json_object" else rules
        if not isinstance(rules, dict):
            raise UserError(
                "response_format: must be text, json_object or json_schema, with a schema"
            )
        return rules

    @property
    def likely(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def choice(self, text: str, log_probs: "list[TokenLogProbs] | None") -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._log_probs(log_probs)}

    def piece(self, text: str, log_probs: "list[TokenLogProbs] | None") -> dict[str, Any]:
        return {"delta": {"content": text}, "logprobs": self._log_probs(log_probs)}

    def _log_probs(self, found: "list[TokenLogProbs] | None") -> dict[str, Any] | None:
        if found is None:
            return None

        def entry(name: str, value: float | None, content: bytes) -> dict[str, Any]:
            return {"token": name, "logprob": value, "bytes": list(content)}

        return {
            "content": [
                entry(it.name, it.log_prob, it.content)
                | {"top_logprobs": [entry(*each) for each in it.top or []]}
                for it in found
            ],
            "refusal": None,
        }


class TokenLogProbs(NamedTuple):
    """The log-probability of a token, and of the most likely ones in its place."""

    name: str
    content: bytes
    log_prob: float | None
    """None for the first token of a prompt."""
    top: list[tuple[str, float, bytes]] | None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, token: int, found: LogProbs | None, likely: int
    ) -> "TokenLogProbs":
        """Describe a token of a text."""
        name, content = token_text(tokenizer, token)
        if found is None:
            return cls(name, content, None, None)
        pairs = zip(found.top_ids_K[:likely], found.top_K[:likely], strict=True)
        texts = ((token_text(tokenizer, int(number)), float(value)) for number, value in pairs)
        top = [(text, value, content) for (text, content), value in texts]
        return cls(name, content, float(found.of_token), top)


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """Return a token's name, and what it adds to a text: UTF-8, or a part of a character, whose
    name shows its bytes; nothing for a special token."""
    content = tokenizer.bytes_of(token)
    if not content:
        return tokenizer.decode([token]) or f"token_id:{token}", b""
    try:
        return content.decode(), content
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content


def error_json(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return the body of a failed request."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def problems(error: pydantic.ValidationError) -> str:
    """Return what is wrong with a body in one line."""
    found = (
        (".".join(map(str, each["loc"][:1])), each["msg"].removeprefix("Value error, "))
        for each in error.errors(include_url=False, include_context=False, include_input=False)
    )
    lines = dict.fromkeys(f"{place}: {text}" if place else text for place, text in found)
    return "; ".join(list(lines)[:5])
