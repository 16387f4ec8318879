"""From a file of chats to a conversation: an imported model is fine-tuned and answers in its chat
template."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from click.testing import CliRunner
from tokenizers import decoders, models

from rungs.cli import download_dataset, generate, pretrained, train
from rungs.cli.generate import converse
from rungs.common.errors import UserError
from rungs.data.build.chat_dataset import ChatFormat
from rungs.data.text.chat_template import ChatTemplate
from rungs.data.text.messages import Message
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.model.generation import Conversation, Request, decode_stream
from tests.data.text.test_chat_template import CASES, CHATML, FIXTURES, format_of, tokenizer_of

MODEL = {
    "vocab_size": 603,
    "context_length": 96,
    "emb_dim": 32,
    "n_layers": 1,
    "n_heads": 2,
    "positions": "rope",
    "norm": "rms_norm",
    "feed_forward": "swiglu",
    "ffn_dim": 64,
    "attention_output_bias": False,
}
ANSWERS = {"Who lit the lamp?": "Nobody could say.", "Which way?": "The river runs north."}
TEMPLATE = CASES["chatml with a default system message"]["source"]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNGS_DATASETS_DIR", str(tmp_path / "datasets"))
    return tmp_path / "datasets"


def call(command: Any, *arguments: object, typed: str | None = None) -> str:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], input=typed)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def write_run(folder: Path, model: dict[str, Any] | None, **settings: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if model:
        (folder / "model.json").write_text(json.dumps(model))
    small = {"microbatch_size": 8, "learning_rate": 0.01, "checkpoint_interval": 1000}
    (folder / "train.json").write_text(json.dumps({**small, **settings}))


def published_model(folder: Path, place: Path) -> Path:
    """Write a model that knows text, with its tokenizer and chat template, as the hub has it: like
    other base models, it ends its texts with <|endoftext|> alone."""
    tokenizer = FIXTURES / "tokenizers" / "qwen" / "tokenizer.json"
    text = place / "text.txt"
    text.write_text("The river runs north here.\n" * 300)
    call(download_dataset.main, "--text", text, "--name", "text", "--tokenizer", tokenizer)
    write_run(place / "base", MODEL, dataset="text", min_train_tokens=768)
    call(train.main, place / "base")
    call(pretrained.main, "export", place / "base", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ends = {"eos_token_id": load_tokenizer(folder).end_of_text}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder


@pytest.mark.long
@pytest.mark.usefixtures("datasets")
def test_an_imported_model_learns_to_answer_in_its_template(tmp_path: Path) -> None:
    call(pretrained.main, "import", published_model(tmp_path / "hf", tmp_path), tmp_path / "run")
    chats = [
        {"messages": [message(asked, "user"), message(answer, "assistant")]}
        for asked, answer in ANSWERS.items()
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats * 200))
    imported = tmp_path / "run" / "checkpoints" / "imported"
    call(download_dataset.main, "--chats", file, "--name", "talk", "--tokenizer", imported)
    write_run(
        tmp_path / "run",
        None,
        dataset="talk",
        documents="separate",
        start_from="imported",
        epochs=4,
    )
    call(train.main, tmp_path / "run")
    shutil.rmtree(imported)  # checkpoints stand on their own
    typed = "Which way?\n\nWho lit the lamp?\n/new\nWho lit the lamp?\n"
    said = call(generate.main, tmp_path / "run", "--chat", typed=typed).splitlines()
    way, lamp = ANSWERS["Which way?"], ANSWERS["Who lit the lamp?"]
    assert said[0] == way
    assert said[2] == lamp
    ahead = call(generate.main, tmp_path / "run", "--chat", "--lookahead", 4, typed=typed)
    assert ahead.splitlines() == said
    call(pretrained.main, "export", tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = load_tokenizer(tmp_path / "out")
    assert [tokenizer.decode([end]) for end in ends] == ["<|endoftext|>", "<|im_end|>"]


def message(content: str, role: str) -> dict[str, str]:
    return {"role": role, "content": content}


class FakeGenerator:
    """Says what it is told to, and remembers the prompts."""

    context_length = 1000

    def __init__(self, form: Any, *answers: str) -> None:
        self._form, self._answers = form, iter(answers)
        self.prompts: list[str] = []
        self.seeds: list[int] = []

    def stream(self, prompts: list[list[int]], request: Any) -> Iterator[list[list[int]]]:
        self.prompts.append(self._form.tokenizer.decode(prompts[0]))
        self.seeds.append(request.seed)
        for number in self._form.tokenizer.encode(next(self._answers)):
            yield [[number]]


def test_each_message_continues_the_conversation() -> None:
    form = format_of(CHATML)
    generator: Any = FakeGenerator(form, "the lamp 🪜", "the river")
    talk = Conversation(generator, form, Request(9, seed=3), [Message("system", "brief")])
    assert "".join(talk.answer("one")) == "the lamp 🪜"
    assert next(talk.answer("two")) != ""
    assert talk.messages[2:4] == [Message("assistant", "the lamp 🪜"), Message("user", "two")]
    assert generator.prompts[1] == (
        "<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\nthe lamp 🪜<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert len(set(generator.seeds)) == 2


def test_a_chat_says_how_fast_each_answer_was(capsys: pytest.CaptureFixture[str]) -> None:
    form = format_of(CHATML)
    answers = "the lamp", "the river"
    generator: Any = FakeGenerator(form, *answers)
    converse(Conversation(generator, form, Request(9)), ["one", "two"])
    printed = capsys.readouterr()
    assert printed.out == "> one\nthe lamp\n> two\nthe river\n"
    lines = printed.err.splitlines()
    assert len(lines) == len(answers)
    for line, answer in zip(lines, answers, strict=True):
        tokens = len(form.tokenizer.encode(answer))
        assert re.fullmatch(rf"{tokens} tokens in \d+\.\d s \(.+ tokens per second\)", line)


def test_a_message_that_is_not_utf_8_is_named() -> None:
    form = format_of(CHATML)
    generator: Any = FakeGenerator(form, "the lamp")
    with pytest.raises(UserError, match="the message: has an invalid character"):
        converse(Conversation(generator, form, Request(9)), ["hi\udcff"])


def test_a_conversation_longer_than_the_context_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeGenerator, "context_length", 40)
    form = format_of(CHATML)
    generator: Any = FakeGenerator(form, "the lamp", "the river")
    converse(Conversation(generator, form, Request(9)), ["one", "two " * 40])
    warned = ["longer than the model's context" in e for e in capsys.readouterr().err.splitlines()]
    assert warned == [False, True, False]


def test_pieces_are_complete_characters() -> None:
    tokenizer = tokenizer_of(CHATML)
    ids = tokenizer.encode("a🪜b")
    pieces = list(decode_stream([[number] for number in ids], tokenizer))
    assert "".join(pieces) == "a🪜b"
    assert all("\ufffd" not in piece for piece in pieces)
    assert list(decode_stream([[number] for number in ids[:2]], tokenizer))[-1] == "\ufffd"


def test_the_history_is_what_was_said() -> None:
    """Bytes that turn out not to be a character rewrite those before them."""
    names = ["</s>", "<0xC3>", "<0xA9>", "a", *"user:istn"]
    raw = tokenizers.Tokenizer(
        models.WordLevel({n: i for i, n in enumerate(dict.fromkeys(names))}, "a")
    )
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    form = ChatFormat(ChatTemplate("{{ messages[0].content }}", {}), Tokenizer(raw))
    answers = [[1], [2], [1], [3], [1, 2]]

    class Says:
        def stream(self, *_: object) -> Iterator[list[list[int]]]:
            yield from ([chunk] for chunk in answers)

    generator: Any = Says()
    talk = Conversation(generator, form, Request(9))
    said = "".join(talk.answer("a"))
    assert said == form.tokenizer.decode([1, 2, 1, 3, 1, 2]) == "\ufffd\ufffd\ufffdaé"
    assert talk.messages[-1] == Message("assistant", said)


def test_options_of_conversations() -> None:
    for arguments, problem in (
        (("run", "hi", "--system", "be brief"), "--system and --chat-template are for --chat"),
        (("run", "--chat", "--num-samples", "2", "--temperature", "1"), "leave it out with --chat"),
    ):
        result = CliRunner().invoke(generate.main, list(arguments))
        assert result.exit_code == 2
        assert problem in result.output
