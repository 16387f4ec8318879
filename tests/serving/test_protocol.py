"""What clients may ask for."""

from typing import Any

import pydantic
import pytest

from rungs.common.errors import UserError
from rungs.model.sampling import Sampling
from rungs.serving.protocol import Body, ChatBody, CompletionBody, problems

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("kind", "keys", "problem"),
    [
        (CompletionBody, {"prompt": None}, "prompt: Field required"),
        (CompletionBody, {"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        (CompletionBody, {"best_of": 2}, "best_of is not supported"),
        (CompletionBody, {"suffix": "x"}, "suffix is not supported"),
        (CompletionBody, {"logit_bias": {"1": 5}}, "logit_bias is not supported"),
        (CompletionBody, {"temperatur": 1}, "unknown parameter temperatur; did you mean temper"),
        (CompletionBody, {"temperature": "hot"}, "temperature: Input should be a valid number"),
        (CompletionBody, {"n": 0}, "n: Input should be greater than or equal to 1"),
        (CompletionBody, {"n": 1.5}, "n: Input should be a valid integer"),
        (CompletionBody, {"stop": ["a"] * 5}, "stop: List should have at most 4 items"),
        (CompletionBody, {"stop": ""}, "stop: String should have at least 1 character"),
        (CompletionBody, {"stop": ["a" * 1001]}, "stop: String should have at most 1000"),
        (CompletionBody, {"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
        (CompletionBody, {"prompt": [1, "a"]}, "prompt: "),
        (CompletionBody, {"tools": [{"type": "function"}]}, "tools is not supported"),
        (ChatBody, {"tools": [{"type": "function"}]}, "tools: each must be {"),
        (ChatBody, {"tool_choice": "required"}, "tool_choice: Input should be 'none' or 'auto'"),
        (ChatBody, {"tool_choice": {"type": "function"}}, "tool_choice: Input should be 'none'"),
        (CompletionBody, {"response_format": {"type": "json_object"}}, "response_format is not"),
        (ChatBody, {"response_format": "json"}, "response_format: Input should be a valid dict"),
        (ChatBody, {"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        (ChatBody, {"echo": True}, "unknown parameter echo"),
        (ChatBody, {"stream_options": {"x": 1}}, "stream_options: Extra inputs"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    kind: type[Body], keys: dict[str, Any], problem: str
) -> None:
    base = COMPLETION if kind is CompletionBody else CHAT
    with pytest.raises(pydantic.ValidationError) as error:
        kind.model_validate(base | keys)
    assert problem in problems(error.value)


def test_values_that_ask_for_nothing_are_taken() -> None:
    nothing = {"frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "user": "me", "suffix": None}
    assert CompletionBody.model_validate(COMPLETION | nothing) == CompletionBody(**COMPLETION)
    plain = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": True}
    chat = ChatBody.model_validate(CHAT | plain | {"parallel_tool_calls": False})
    assert chat.offered == ChatBody(**CHAT).offered == []
    assert CompletionBody.model_validate(COMPLETION | plain) == CompletionBody(**COMPLETION)


def test_settings_are_those_of_the_api() -> None:
    assert CompletionBody(**COMPLETION).sampling((7,)) == Sampling(temperature=1, stop_tokens=(7,))
    keys: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "ignore_eos": True,
    }
    expected = Sampling(temperature=0, top_p=0.5, min_p=0.1)
    assert CompletionBody(**COMPLETION, **keys).sampling((7,)) == expected
    with pytest.raises(ValueError, match=r"^top_p: 1\.5 is not allowed"):
        CompletionBody(**COMPLETION, top_p=1.5).sampling(())
    assert CompletionBody(**COMPLETION, seed=-1).own_seed() == 2**32 - 1
    assert ChatBody(**CHAT).own_seed() != ChatBody(**CHAT).own_seed()


def test_a_form_of_answers_goes_with_nothing_that_it_contradicts() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    form = {"response_format": {"type": "json_object"}}
    for other in ({"tools": tools}, {"ignore_eos": True}):
        body = ChatBody.model_validate(CHAT | form | other)
        with pytest.raises(UserError, match=f"not together with {next(iter(other))}"):
            _ = body.schema_rules
    plain = ChatBody.model_validate(CHAT | form | {"tools": tools, "tool_choice": "none"})
    assert plain.schema_rules == {"type": "object"}
