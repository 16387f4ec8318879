"""Calls of tools: what the model is told, and what a client gets of what it wrote."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from rungs.common.errors import UserError
from rungs.data.text.chat_template import BUILT_IN, ChatTemplate
from rungs.data.text.tool_calls import Call, CallReader, call_beginning, calls_in
from rungs.serving.answering import AnswerText
from rungs.serving.app import App, Limits
from rungs.serving.engine import Delivery, Text
from rungs.serving.protocol import ChatBody
from rungs.serving.served import Loading, Served
from tests.data.text.test_chat_template import tokenizer_of
from tests.serving.conftest import message
from tests.support.layered_model import write_model

_TOLD = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
"""
_END = """</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
_FUNCTIONS = "{% for call in message.tool_calls or [] %}"
TEMPLATES = {
    "<tool_call>": _TOLD
    + _FUNCTIONS
    + """{% set call = call.function %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}"""
    + _END,
    "[TOOL_CALLS]": _TOLD
    + """{% if message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}
{% if call.id | length != 9 %}{{ raise_exception("ids") }}{% endif %}
{{- (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"""
    + _END,
    "{": _TOLD
    + _FUNCTIONS
    + """{% set call = call.function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{% endfor %}"""
    + _END,
}
WRITTEN = {
    "<tool_call>": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>',
    "[TOOL_CALLS]": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "é"}}]',
    "{": '{"name": "add", "parameters": {"a": 1, "b": "é"}}',
}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SECOND = '{"name": "add", "arguments": {"a": 2}}'
TWO = WRITTEN["<tool_call>"] + f"\n<tool_call>\n{SECOND}\n</tool_call>"


class Scripted:
    """An engine that writes given tokens, some at a time."""

    def __init__(self, tokens: list[int], size: int) -> None:
        self._tokens, self._size = tokens, size

    def submit(self, _: str, texts: list[Text]) -> None:
        for text in texts:
            for place in range(0, len(self._tokens), self._size):
                piece = self._tokens[place : place + self._size]
                is_last = place + self._size >= len(self._tokens)
                text.deliver(Delivery(piece, [None] * len(piece), "stop" if is_last else None))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "m", context_length=1024)


@pytest.fixture
def served(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Served:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATES[request.param])
    return Served(str(model), Loading(chat_template=file))


def client_of(served: Served, written: str, size: int) -> Any:
    engine: Any = Scripted(served.tokenizer.encode(written), size)
    routes = App({"m": served}, engine, Limits(), None, None).asgi
    http: Any = TestClient(routes, base_url="http://x/v1")
    return openai.OpenAI(base_url="http://x/v1", api_key="none", http_client=http, max_retries=0)


ASK: dict[str, Any] = {"model": "m", "messages": [message("1 + é?")], "tools": [ADD]}


def answers(client: Any, **changes: Any) -> list[tuple[str, list[tuple[str, Any]], str]]:
    """Return content, calls and end of an answer, whole and streamed."""
    whole = client.chat.completions.create(**ASK | changes).choices[0]
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in whole.message.tool_calls or []
    ]
    content, found, finish = "", dict[int, list[str]](), ""
    for event in client.chat.completions.create(**ASK | changes, stream=True):
        [piece] = event.choices
        content += piece.delta.content or ""
        for call in piece.delta.tool_calls or []:
            assert len(call.id) == 9
            name, arguments = found.setdefault(call.index, ["", ""])
            found[call.index] = [name + call.function.name, arguments + call.function.arguments]
        finish = piece.finish_reason or finish
    streamed = [(name, json.loads(arguments)) for name, arguments in found.values()]
    return [
        (whole.message.content or "", calls, whole.finish_reason),
        (content, streamed, finish),
    ]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("served", TEMPLATES, indirect=True)
def test_a_call_is_read(served: Served, size: int, request: pytest.FixtureRequest) -> None:
    written = WRITTEN[request.node.callspec.params["served"]]
    expected = ("", [("add", {"a": 1, "b": "é"})], "tool_calls")
    assert answers(client_of(served, written, size)) == [expected] * 2
    text: Any = (written, [], "stop")
    assert answers(client_of(served, written, size), tool_choice="none") == [text] * 2
    other = [ADD | {"function": {"name": "other"}}]
    assert answers(client_of(served, written, size), tools=other) == [text] * 2


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("served", ["<tool_call>"], indirect=True)
def test_text_before_calls_is_content_and_other_text_stays(served: Served, size: int) -> None:
    first, second = ("add", {"a": 1, "b": "é"}), ("add", {"a": 2})
    for written, content, calls in (
        ("Let me see. " + TWO, "Let me see. ", [first, second]),
        ("I <tool_ca", "I <tool_ca", []),
        ("<tool_call>\n{", "<tool_call>\n{", []),
        (TWO + " done", TWO + " done", []),
        ("x < y", "x < y", []),
    ):
        finish = "tool_calls" if calls else "stop"
        whole, streamed = answers(client_of(served, written, size))
        assert whole == (content.strip() if calls else content, calls, finish)
        assert streamed == (content, calls, finish)
    one = answers(client_of(served, TWO, size), parallel_tool_calls=False)
    assert [calls for _, calls, _ in one] == [[first]] * 2


@pytest.mark.parametrize("served", ["{"], indirect=True)
def test_a_json_object_is_a_call_only_as_the_whole_answer(served: Served) -> None:
    for written in ("So: " + WRITTEN["{"], '{"name": "add"}', "{}", "[1]", "{" * 900):
        assert answers(client_of(served, written, 3)) == [(written, [], "stop")] * 2


@pytest.mark.parametrize("served", TEMPLATES, indirect=True)
def test_the_template_gets_tools_and_calls(served: Served) -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    calls = [{"id": "abcdefghi", "type": "function", "function": call}]
    asked = [message("1?"), {"role": "assistant", "content": None, "tool_calls": calls}]
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"}
    body = ChatBody.model_validate(ASK | {"messages": [*asked, result]})
    [prompt] = served.prompts(body)
    text = served.tokenizer.decode(prompt)
    assert text.startswith(json.dumps(ADD) + "\n<user>1?")
    assert '{"a": 1}' in text
    assert "<tool>2" in text
    untold = served.prompts(body.model_copy(update={"tool_choice": "none"}))
    assert "<user>1?" in served.tokenizer.decode(untold[0])
    assert json.dumps(ADD) not in served.tokenizer.decode(untold[0])
    call["arguments"] = "{"
    with pytest.raises(ValueError, match="tool_calls: Expecting"):
        body.conversation()


def test_a_model_whose_template_knows_no_tools_is_refused(model: Path) -> None:
    templates = [BUILT_IN[name].read_text() for name in BUILT_IN]
    templates.append(TEMPLATES["<tool_call>"].replace("<tool_call>", "<function>"))
    templates.append(TEMPLATES["{"].replace("{% if add_generation", "{% if false and add_gener"))
    assert [call_beginning(ChatTemplate(source, {})) for source in templates] == [None] * 5
    loading = Loading(chat_template=BUILT_IN["chatml"])
    with pytest.raises(UserError, match=r"^tools: this model's chat template has none"):
        Served(str(model), loading).prompts(ChatBody.model_validate(ASK))


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        ('{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}', ["f", "g"], ""),
        ('<|python_tag|>{"name": "f", "parameters": {}}', ["f"], ""),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "1"}', ["f"], ""),
        ('{"name": "f", "arguments": {}} and', ["f"], "and"),
        ('{"name": 1, "arguments": {}}', [], '{"name": 1, "arguments": {}}'),
        ('{"name": "f", "arguments": "{}"}', [], '{"name": "f", "arguments": "{}"}'),
    ],
)
def test_calls_are_read_up_to_what_is_none(text: str, calls: list[str], rest: str) -> None:
    assert calls_in(text) == ([Call(name, {}) for name in calls], rest)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_the_beginning_of_calls_may_be_a_special_token(size: int) -> None:
    """Mistral's is; a text of the tokens leaves it out."""
    tokenizer = tokenizer_of({"tokenizer": "gpt2", "added_tokens": ["[TOOL_CALLS]"]})
    tokens = tokenizer.encode("Well." + WRITTEN["[TOOL_CALLS]"])
    reader = CallReader(tokenizer, "[TOOL_CALLS]", ["add"])
    answer = AnswerText(tokenizer, tokenizer.encode("a"), [], reader)
    text = ""
    for place in range(0, len(tokens), size):
        text += answer.add(tokens[place : place + size], place + size >= len(tokens))
    assert (text, reader.calls) == ("Well.", [Call("add", {"a": 1, "b": "é"})])
