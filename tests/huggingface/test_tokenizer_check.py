"""The comparison of tokenizers, with recorded answers instead of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from click.testing import CliRunner, Result

from rungs.cli import pretrained
from rungs.data.chats.chat_template import ChatTemplate
from rungs.data.tokenizer_files import load_tokenizer
from rungs.huggingface import tokenizer_check, transformers_check
from rungs.huggingface.tokenizer_check import TEXTS, Request, differences, request_for
from tests.support.published_models import MODELS, copy

TOKENIZERS = MODELS.parent / "tokenizers"
FAST = ("gemma", "gpt2", "llama3", "mistral", "qwen")
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def answers_of(folder: Path, request: Request) -> dict[str, list[Any]]:
    """Return what the library of transformers' fast tokenizers makes of a request."""
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [library.encode(text, add_special_tokens=False).ids for text in request.texts]
    whole = [library.encode(text).ids for text in request.texts]
    chats: list[list[int] | None] = []
    for chat in request.chats:
        text = "".join(f"[{turn['role']}] {turn['content']}\n" for turn in chat) + "[assistant] "
        ids = library.encode(text, add_special_tokens=False).ids
        has_template = (folder / "chat_template.jinja").exists()
        refused = chat[0]["role"] == "system" or not has_template
        chats.append(None if refused else ids)
    return {"texts": texts, "special": [], "whole": whole, "chats": chats}


def with_template(name: str, folder: Path) -> Path:
    shutil.copytree(TOKENIZERS / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize("name", FAST)
def test_equal_tokenizers_have_no_difference(name: str, tmp_path: Path) -> None:
    folder = with_template(name, tmp_path / name)
    tokenizer, template = load_tokenizer(folder), ChatTemplate.find(folder)
    request = request_for(tokenizer)
    assert list(differences(tokenizer, template, request, answers_of(folder, request))) == []


def test_each_kind_of_difference_is_named(tmp_path: Path) -> None:
    folder = with_template("llama3", tmp_path / "llama3")
    tokenizer, template = load_tokenizer(folder), ChatTemplate.find(folder)
    request = request_for(tokenizer)
    answers = answers_of(folder, request)
    answers["texts"][0] = answers["texts"][0][1:]
    answers["whole"][1] = answers["whole"][1][1:]
    answers["special"] = [["a <x>b", [3]], [request.texts[-1], [4]]]
    answers["chats"][1], answers["chats"][2] = None, [1, 2]
    found = list(differences(tokenizer, template, request, answers))
    assert found[0].startswith(f"{TEXTS[0]!r} is [")
    assert found[1].startswith(f"{TEXTS[1]!r}, with what begins and ends it, is [")
    assert found[2].startswith("'a <x>b' is [")
    assert found[2].endswith("in transformers [3]")
    assert found[3].startswith("a chat of 3 messages is [")
    assert found[3].endswith("in transformers refused")
    assert found[4] == "a chat of 4 messages is refused, in transformers [1, 2]"
    assert len(found) == 5


def test_the_request_has_many_scripts_and_the_special_tokens() -> None:
    blocks = {ord(character) // 0x80 for character in "".join(TEXTS)}
    assert len(blocks) > 50
    tokenizer = load_tokenizer(TOKENIZERS / "llama3")
    request = request_for(tokenizer)
    special = [tokenizer.decode([number]) for number in sorted(tokenizer.special_ids)]
    assert special
    assert request.texts == [*TEXTS, *(f"a {name}b" for name in special)]
    count = f"{len(TEXTS)} texts, {len(special)} special token"
    described = request.describe({"chats": [[1], None, [2]]})
    assert described.startswith(count)
    assert described.endswith(" and 2 chats")


def test_a_lost_template_is_a_difference(tmp_path: Path) -> None:
    folder = with_template("qwen", tmp_path / "qwen")
    tokenizer = load_tokenizer(folder)
    request = request_for(tokenizer)
    found = list(differences(tokenizer, None, request, answers_of(folder, request)))
    assert found[0].startswith("a chat of 1 message is refused, in transformers [")
    assert len(found) == 2


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with a tokenizer, whose activations agree; the command of the check is recorded."""
    source = copy("gpt2", tmp_path / "source")
    for file in (TOKENIZERS / "gpt2").iterdir():
        if file.name != "expected.json":
            shutil.copy(file, source)
    monkeypatch.setattr("rungs.huggingface.transformers_check.require_transformers", lambda _: None)
    monkeypatch.setattr(transformers_check, "_compare_activations", lambda *_: None)

    def run(_: str, program: str, folder: Path, asked: Path, target: Path) -> None:
        assert program == "transformers_tokenizer.py"
        request = Request(**json.loads(asked.read_text()))
        target.write_text(json.dumps(answers_of(folder, request)))

    monkeypatch.setattr(transformers_check, "_run", run)
    return source


def check(source: Path, run: Path) -> Result:
    return CliRunner().invoke(pretrained.main, ["import", str(source), str(run), "--check"])


def test_a_check_compares_the_tokenizer(checked: Path, tmp_path: Path) -> None:
    result = check(checked, tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert f"compared the tokenizer with transformers: {len(TEXTS)} texts, " in result.output


def test_a_tokenizer_that_differs_undoes_the_import(
    checked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_check, "TEXTS", ("a", "b"))
    monkeypatch.setattr(
        "tests.huggingface.test_tokenizer_check.answers_of",
        lambda _, request: {
            "texts": [[7]] * len(request.texts),
            "special": [],
            "whole": [[7]] * len(request.texts),
            "chats": [],
        },
    )
    result = check(checked, tmp_path / "run")
    assert result.exit_code == 1
    assert "error: the tokenizer diverges from transformers: 'a' is [" in result.output
    assert "in transformers [7]; " in result.output
    assert not (tmp_path / "run").exists()
