"""Answers of a JSON schema from random weights, which would write no JSON by themselves."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from tests.serving.conftest import Answering, message

pytest.importorskip("llguidance", reason="needs `uv run --extra structured`")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["é", "b"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": PERSON,
    "choice": {"enum": ["yes", "no", None, 1.5]},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "one of": {"anyOf": [{"const": {"a": 1}}, {"type": "integer", "multipleOf": 7, "maximum": 99}]},
}
ASK: dict[str, Any] = {"model": "chat", "messages": [message("Hi")], "max_tokens": 76}


def form_of(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "answer", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": named}


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_follow_the_schema(answering: Answering, name: str) -> None:
    schema = SCHEMAS[name]
    keys = ASK | {"response_format": form_of(schema), "n": 4}
    texts = []
    for seed in range(4):
        choices = answering.client.chat.completions.create(**keys, seed=seed).choices
        assert [choice.finish_reason for choice in choices] == ["stop"] * 4
        texts += [choice.message.content for choice in choices]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
        assert "\n" not in text
    assert len({*texts}) > 1
    events = answering.client.chat.completions.create(**keys, seed=3, stream=True)
    pieces = ["", "", "", ""]
    for event in events:
        pieces[event.choices[0].index] += event.choices[0].delta.content or ""
    assert pieces == texts[-4:]


def test_greedy_answers_follow_the_schema(answering: Answering) -> None:
    keys = ASK | {"temperature": 0, "response_format": form_of(PERSON)}
    keys |= {"logprobs": True, "extra_body": {"repetition_penalty": 1.3}}
    choice = answering.client.chat.completions.create(**keys).choices[0]
    jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
    spelled = b"".join(bytes(one.bytes) for one in choice.logprobs.content)
    assert spelled.decode() == choice.message.content


def test_any_object(answering: Answering) -> None:
    """It may be as long as the model likes; then it is cut off."""
    for seed in range(6):
        keys = ASK | {"response_format": {"type": "json_object"}, "seed": seed}
        choice = answering.client.chat.completions.create(**keys).choices[0]
        text = choice.message.content or ""
        assert text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


def test_other_texts_at_the_same_time_are_free(answering: Answering) -> None:
    free = ASK | {"seed": 5, "max_tokens": 20}
    alone = answering.client.chat.completions.create(**free).choices[0].message.content
    bound = ASK | {"response_format": form_of(PERSON), "seed": 6}

    def ask(keys: dict[str, Any]) -> str:
        return answering.client.chat.completions.create(**keys).choices[0].message.content or ""

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(ask, [free, bound, free, bound]))
    assert texts[::2] == [alone, alone]
    assert texts[1] == texts[3] == ask(bound)
    jsonschema.validate(json.loads(texts[1]), PERSON)


@pytest.mark.parametrize(
    ("form", "changes", "problem"),
    [
        (form_of({"type": "nosuch"}), {}, "response_format: Invalid type: nosuch"),
        (form_of({"not": {}}), {}, 'response_format: Unimplemented keys: ["not"]'),
        (form_of({"$ref": "#/x"}), {}, "response_format: Pointer '/x' does not exist"),
        ({"type": "json_schema"}, {}, "response_format: must be text, json_object or"),
        ({"type": "xml"}, {}, "response_format: must be text, json_object or"),
        ({"type": "json_object"}, {"extra_body": {"ignore_eos": True}}, "together with ignore_eos"),
    ],
)
def test_what_can_not_be_followed_is_refused(
    answering: Answering, form: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        answering.client.chat.completions.create(**ASK, response_format=form, **changes)
    assert problem in error.value.message
