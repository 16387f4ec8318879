"""Chats as `transformers` renders, tokenizes and masks them; see tests/fixtures/make_chats.py."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from rungs.common.errors import UserError
from rungs.data.build.chat_dataset import ChatFormat
from rungs.data.text.chat_template import ChatTemplate
from rungs.data.text.messages import Chat, Message, chat_of
from rungs.data.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = {case["name"]: case for case in json.loads((FIXTURES / "chats.json").read_text("utf-8"))}
CHATML = CASES["chatml"]
TALK = [Message("user", "hi"), Message("assistant", "yes?")]


def tokenizer_of(case: dict[str, Any]) -> Tokenizer:
    path = FIXTURES / "tokenizers" / case["tokenizer"] / "tokenizer.json"
    raw = tokenizers.Tokenizer.from_file(str(path))
    raw.add_tokens([AddedToken(token, special=True) for token in case["added_tokens"]])
    return Tokenizer(raw)


def format_of(case: dict[str, Any], key: str = "source") -> ChatFormat:
    return ChatFormat(ChatTemplate(case[key], case["special_tokens"]), tokenizer_of(case))


def parsed(chat: dict[str, Any]) -> Chat:
    line = {"messages": chat["messages"], **chat.get("variables", {})}
    return chat_of(line)


@pytest.mark.parametrize("key", ["marked", "source"])
@pytest.mark.parametrize("name", CASES)
def test_ids_and_answers_are_those_of_transformers(name: str, key: str) -> None:
    case, compared = CASES[name], 0
    form = format_of(case, key)
    for chat in case["chats"]:
        messages, variables, _ = parsed(chat)
        if "refused" in chat:
            with pytest.raises(UserError, match=r"refuses this chat: (System|Only)"):
                form.encode(messages, variables)
            continue
        assert form.template.render(messages, variables) == chat["text"]
        prompt = form.template.render(messages[:-1], variables, add_generation_prompt=True)
        assert prompt == chat["prompt"]
        ids, mask = list[int](), list[int]()
        for before, answer in form.encode(messages, variables):
            ids += before + answer
            mask += [0] * len(before) + [1] * len(answer)
        assert ids == chat["ids"][: len(ids)]
        assert mask == chat["mask"][: len(ids)]
        assert sum(chat["mask"]) == sum(mask)
        compared += 1
    assert compared


def test_an_answer_ends_with_the_special_token_after_it() -> None:
    form = format_of(CHATML)
    assert form.end_of_turn == form.tokenizer.encode("<|im_end|>")[0]
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert dataclasses.replace(form, template=ChatTemplate(plain, {})).end_of_turn is None


def test_a_template_that_changes_with_the_answer_is_refused() -> None:
    counting = "{% for m in messages %}{{ m.content | length }} {{ m.content }}{% endfor %}"
    silent = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    talk = [Message("user", "hi"), Message("assistant", "so and so and so")]
    for source in (counting, silent):
        with pytest.raises(UserError, match=r"mark it in the template, with \{% generation %\}"):
            ChatTemplate(source, {}).render_answers(talk)


def test_a_template_may_mark_its_answers() -> None:
    """This one would be refused without marks."""
    source = (
        "{% for m in messages %}{{ m.content | length }} {% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}.{% endgeneration %}{% else %}{{ m.content }} {% endif %}"
        "{% endfor %}"
    )
    talk = [Message("user", "hi"), Message("assistant", "so and so")]
    found = ChatTemplate(source, {}).render_answers(talk)
    assert found.text == ChatTemplate(source, {}).render(talk) == "2 hi 9 so and so."
    assert [found.text[slice(*span)] for span in found.answers] == ["so and so."]
    assert found.are_marked


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for m in messages %}", "is not valid: .*'endfor'"),
        ("{{ messages[9].content }}", "refuses this chat: .*has no element 9"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses this chat: roles must alternate",
        ),
        ("{{ ''.__class__.__mro__ }}", "refuses this chat: .*unsafe"),
    ],
)
def test_a_bad_template_is_one_line(source: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"^the chat template {problem}"):
        ChatTemplate(source, {}).render(TALK)


def with_keys(**keys: Any) -> list[Message]:
    return [TALK[0], TALK[1]._replace(keys=keys)]


@pytest.mark.parametrize(
    ("messages", "variables", "left_out"),
    [
        (TALK, {"tools": [{"name": "add"}]}, "tools"),
        (TALK, {"documents": [{"title": "a"}]}, "documents"),
        (TALK, {"enable_thinking": True}, "enable_thinking"),
        (with_keys(tool_calls=[{"function": {"name": "add"}}]), {}, "tool_calls"),
        (with_keys(reasoning="It may be."), {}, "reasoning_content"),
    ],
)
def test_what_a_template_has_no_place_for_is_refused(
    messages: list[Message], variables: dict[str, Any], left_out: str
) -> None:
    template = ChatTemplate(CHATML["source"], CHATML["special_tokens"])
    with pytest.raises(UserError, match=f"^the chat template leaves out {left_out}; give one"):
        template.render_answers(messages, variables)
    marked = "{% generation %}{{ messages | tojson }}{{ tools }}{% endgeneration %}"
    unnamed = f"{marked}{{{{ documents }}}}{{{{ enable_thinking }}}}"
    assert ChatTemplate(unnamed, {}).render_answers(messages, variables).answers


def test_reasoning_has_the_names_that_templates_know() -> None:
    messages = with_keys(reasoning="It may be.")
    for name in ("reasoning_content", "thinking", "reasoning"):
        template = ChatTemplate(f"{{{{ messages[1].{name} }}}}", {})
        assert template.render(messages) == "It may be."


def test_a_template_is_found_where_models_have_it(tmp_path: Path) -> None:
    source, keys = CHATML["source"], {"eos_token": {"content": "<|im_end|>"}, "bos_token": None}
    config = tmp_path / "tokenizer_config.json"
    for template in (
        source,
        [{"name": "tool", "template": "x"}, {"name": "default", "template": source}],
    ):
        config.write_text(json.dumps({**keys, "chat_template": template}))
        assert ChatTemplate.load(tmp_path).source == source
    assert ChatTemplate.load(tmp_path).special_tokens == {"eos_token": "<|im_end|>"}
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert ChatTemplate.load(tmp_path).source == "newer"
    own = tmp_path / "own.jinja"
    own.write_text("mine")
    assert ChatTemplate.load(tmp_path, own).source == "mine"
    config.unlink()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    assert ChatTemplate.load(tmp_path / "tokenizer.json").source == "older"
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(UserError, match=r"has no chat template .* give one with --chat-template"):
        ChatTemplate.load(tmp_path)


def test_a_model_may_have_a_template_for_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "no {{ tools }}"},
        {"name": "tool_use", "template": "with {{ tools | length }}"},
        {"name": ["odd"], "template": 3},
        "odd",
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert template.render(TALK) == "no None"
    assert template.render(TALK, {"tools": [{}]}) == "with 1"


def test_a_saved_template_is_loaded_again(tmp_path: Path) -> None:
    template = ChatTemplate(CHATML["source"], CHATML["special_tokens"])
    template.save(tmp_path)
    loaded = ChatTemplate.load(tmp_path)
    assert (loaded.source, loaded.special_tokens) == (template.source, template.special_tokens)
