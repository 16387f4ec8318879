"""Building datasets of chats: what is learned, and which lines are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rungs.cli import download_dataset
from rungs.common.errors import UserError
from rungs.config.train_config import TrainConfig
from rungs.data.provenance import Provenance
from rungs.data.text.chat_template import ChatTemplate, read_template_files
from rungs.data.text.messages import chat_of
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.token_file import AnsweredDocuments
from tests.data.text.test_chat_template import CHATML

ASKED = {"role": "user", "content": "Who lit the lamp?"}
ANSWERED = {"role": "assistant", "content": "Nobody could say."}
CHAT = {"messages": [ASKED, ANSWERED]}


def build(model: Path, *lines: Any, options: tuple[str, ...] = ()) -> Result:
    file = model.parent / "talk.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n")
    place = ("--datasets-dir", model.parent / "datasets", "--validation-percent", 0)
    arguments = ["--chats", file, "--name", "talk", "--tokenizer", model, *place, *options]
    return CliRunner().invoke(download_dataset.main, [*map(str, arguments)])


def test_what_the_assistant_says_is_learned(model: Path) -> None:
    long = {"messages": [ASKED, ANSWERED, ASKED, {**ANSWERED, "content": "It's been lit."}]}
    result = build(model, CHAT, "", long)
    assert result.exit_code == 0, result.output
    assert "2 chats, the longest has" in result.output
    folder = model.parent / "datasets" / "talk"
    tokenizer, documents = load_tokenizer(folder), AnsweredDocuments(folder / "train.safetensors")
    tokens, is_answer, lengths = documents.read(0, 2)
    learned = tokenizer.decode(tokens[is_answer].tolist())
    assert learned == "Nobody could say.<|im_end|>" * 2 + "It's been lit.<|im_end|>"
    first = tokenizer.decode(tokens[: lengths[0]].tolist())
    assert first == (
        "<|im_start|>user\nWho lit the lamp?<|im_end|>\n"
        "<|im_start|>assistant\nNobody could say.<|im_end|>"
    )
    assert (folder / "chat_template.jinja").read_text() == CHATML["source"]
    chats = Dataset("talk", folder).description.source.chats
    assert chats is not None
    assert chats.left_out == 0


def test_a_mixture_with_chats_has_their_template(model: Path) -> None:
    build(model, CHAT)
    datasets = model.parent / "datasets"
    (model.parent / "text.txt").write_text("The river runs north here.\n" * 20)
    text = ("--text", model.parent / "text.txt", "--name", "text", "--validation-percent", 0)
    place = ("--tokenizer", model, "--datasets-dir", datasets)
    result = CliRunner().invoke(download_dataset.main, [*map(str, (*text, *place))])
    assert result.exit_code == 0, result.output
    train = TrainConfig(
        dataset={"text": 1, "talk": 1}, microbatch_size=1, learning_rate=1, checkpoint_interval=1
    )
    opened = {name: Dataset(name, datasets / name) for name in train.datasets}
    provenance = Provenance.of(train, opened)
    assert provenance.tokenizer == "talk"
    assert provenance.tokenizer_file is not None
    assert read_template_files(provenance.tokenizer_file.parent)


def test_chats_that_are_too_long_are_left_out_and_counted(model: Path) -> None:
    talk = {"messages": [ASKED, {**ANSWERED, "content": "so " * 200}]}
    result = build(model, CHAT, talk, CHAT, options=("--max-tokens", "100"))
    assert result.exit_code == 0, result.output
    assert "2 chats, the longest has" in result.output
    assert "1 chat of more than 100 tokens left out" in result.output
    (model.parent / "datasets" / "talk" / "dataset.json").unlink()


def learned(model: Path, line: Any, options: tuple[str, ...] = ()) -> str:
    """Return what is learned of a chat, in a dataset of it."""
    result = build(model, line, options=options)
    assert result.exit_code == 0, result.output
    folder = model.parent / "datasets" / "talk"
    tokens, is_answer, _ = AnsweredDocuments(folder / "train.safetensors").read(0, 1)
    return load_tokenizer(folder).decode(tokens[is_answer].tolist())


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_a_message_of_weight_0_is_not_learned(key: str, is_marked: bool, model: Path) -> None:
    bad = {**ANSWERED, "content": "The river.", key: 0}
    template = model.parent / "template.jinja"
    template.write_text(CHATML["marked" if is_marked else "source"])
    options = ("--chat-template", str(template))
    chat = {"messages": [ASKED, bad, ASKED, {**ANSWERED, key: True}]}
    assert learned(model, chat, options) == "Nobody could say.<|im_end|>"


def test_a_marked_message_in_several_parts_has_no_weight() -> None:
    source = CHATML["marked"] + "{% generation %}!{% endgeneration %}"
    messages = chat_of({"messages": [ASKED, {**ANSWERED, "weight": 0}, ANSWERED]}).messages
    with pytest.raises(UserError, match="marks 3 parts in 2 messages from the assistant"):
        ChatTemplate(source, {}).render_answers(messages)


def test_keys_that_are_not_used_are_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert build(model, {**CHAT, "id": 7, "source": "me", "tools": None}).exit_code == 0
    assert "keys of chats that are not used: id, source" in caplog.text


def test_a_system_message_beside_the_others() -> None:
    line = {"system": "Be brief.", "conversations": [{"from": "gpt", "value": "yes"}]}
    messages = chat_of(line).messages
    assert [message[:2] for message in messages] == [("system", "Be brief."), ("assistant", "yes")]


def test_sharegpt_is_read_too() -> None:
    turns = [("system", "Be brief."), ("human", "hi"), ("gpt", "yes?"), ("observation", "3")]
    line = {"id": 7, "conversations": [{"from": who, "value": text} for who, text in turns]}
    roles = ("system", "user", "assistant", "tool")
    assert [message[:2] for message in chat_of(line).messages] == [
        (role, text) for role, (_, text) in zip(roles, turns, strict=True)
    ]


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]
    line = {"messages": [ASKED, {"role": "assistant", "content": parts}]}
    assert chat_of(line).messages[1].content == "yes"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "malformed JSON at column 2"),
        ("[1]", r"must be \{\"messages\": \[…\]\}, not \[1\]"),
        ({"prompt": "a", "answer": "b"}, r"has neither messages nor .* \(its keys: prompt, answer"),
        ({"messages": []}, "messages: has no message"),
        ({"messages": "Hello"}, 'messages: "Hello" is not a list of messages'),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: content: missing"),
        ({"messages": [{**ASKED, "role": "me"}]}, r"role: \"me\" is not one of system, developer"),
        ({"messages": [{**ASKED, "content": None}]}, "content: null is not a string"),
        ({"messages": [{**ASKED, "content": [{"type": "image"}]}]}, "has a part that is not text"),
        ({"messages": [{**ASKED, "content": "\ud800"}, ANSWERED]}, "invalid character"),
        ({"messages": [ASKED]}, "no message from the assistant"),
        (
            {"messages": [ASKED, {**ANSWERED, "weight": 0.5}]},
            r"\[1\]: weight: 0.5 is neither 0 nor",
        ),
        ({"messages": [{**ASKED, "train": True}, ANSWERED]}, "train: true, but only messages from"),
        ({"messages": [ASKED, {**ANSWERED, "train_detail": [{}]}]}, "train_detail: not supported"),
        ({**CHAT, "weight": 0}, "weight: not supported in a line"),
        ({**CHAT, "tools": "[]"}, r'tools: "\[\]" is not a list of objects'),
        ({**CHAT, "tools": [{"name": "a"}]}, "the chat template leaves out tools"),
        (
            {"system": "a", "messages": [{"role": "system", "content": "b"}, ASKED, ANSWERED]},
            "system: is not what the first message says",
        ),
        ({"messages": [ASKED, {**ANSWERED, "content": ""}]}, "no message from the assistant"),
    ],
)
def test_a_line_that_is_no_chat_is_named(line: Any, problem: str, model: Path) -> None:
    result = build(model, CHAT, line)
    assert result.exception is not None
    assert str(result.exception).count("\n") == 0
    with pytest.raises(type(result.exception), match=rf"talk\.jsonl: line 2: .*{problem}"):
        raise result.exception
    assert not (model.parent / "datasets" / "talk").exists()


def test_a_template_that_refuses_a_chat_names_its_line(model: Path) -> None:
    template = model.parent / "strict.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    result = build(model, CHAT, options=("--chat-template", str(template)))
    assert str(result.exception).endswith(
        "talk.jsonl: line 1: the chat template refuses this chat: roles must alternate"
    )
