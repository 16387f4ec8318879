"""`pretrained.py import --check`: with recorded answers of transformers, and for every family with
transformers itself, which takes a Python with PyTorch and transformers:
`RUNGS_TRANSFORMERS_PYTHON=PATH uv run pytest` this file."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from click.testing import CliRunner, Result

from rungs.cli import pretrained
from rungs.common.errors import RunFailure
from rungs.data.text.chat_template import ChatTemplate
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.huggingface import transformers_check
from rungs.huggingface.transformers_check import (
    CHATS,
    TEXTS,
    differences,
    relative_difference,
    sample_tokens,
)
from tests.support.configs import model_config
from tests.support.published_models import MODELS, copy, expected

TOKENIZERS = MODELS.parent / "tokenizers"
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
OTHER_TEMPLATE = TEMPLATE.replace("[assistant] ", "[assistant]")


def check(source: Path, run: Path, *options: str) -> Result:
    words = ["import", str(source), str(run), "--check", *options]
    return CliRunner().invoke(pretrained.main, words)


def with_tokenizer(folder: Path, name: str, template: str | None = TEMPLATE) -> Path:
    shutil.copytree(TOKENIZERS / name, folder, dirs_exist_ok=True)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def ids_of(folder: Path, texts: list[str]) -> dict[str, list[Any]]:
    """Return what the library of transformers' fast tokenizers makes of texts and chats."""
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def chat_ids(chat: Any) -> list[int] | None:
        text = "".join(f"[{turn['role']}] {turn['content']}\n" for turn in chat) + "[assistant] "
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return None if chat[0]["role"] == "system" else ids

    plain = [library.encode(text, add_special_tokens=False).ids for text in texts]
    whole = [library.encode(text).ids for text in texts]
    return {"texts": texts, "plain": plain, "whole": whole, "chats": [*map(chat_ids, CHATS)]}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What transformers computed for the fixture gpt2."""
    values = expected("gpt2")
    answers: dict[str, Any] = {
        "hidden_states": values["hidden_states"][:, 0],
        "logits": values["logits"][0],
    }
    answers["ids"] = json.dumps({})
    monkeypatch.setattr(transformers_check, "sample_tokens", lambda _: values["tokens"][0])
    monkeypatch.setattr(transformers_check, "ask_transformers", lambda *_: answers)
    monkeypatch.setattr("rungs.huggingface.transformers_check.require_transformers", lambda _: None)
    return answers


# Hidden states


@pytest.mark.usefixtures("recorded")
def test_a_check_passes_if_all_layers_agree(tmp_path: Path) -> None:
    result = check(MODELS / "gpt2", tmp_path / "run")
    assert result.exit_code == 0, result.output
    states = ("  embedding", "  block", "  logits")
    rows = [line.split() for line in result.output.splitlines() if line.startswith(states)]
    assert len(rows) == 5
    assert all(float(row[-1]) < 1e-5 for row in rows)
    assert "the same after 24 of 24 tokens" in result.output
    assert "agrees with transformers: no difference is above 0.0001" in result.output


@pytest.mark.parametrize(("factor", "shown"), [(1.001, "1.0e-03"), (np.nan, "nan")])
def test_a_failed_check_names_the_first_layer_and_undoes_the_import(
    factor: float, shown: str, tmp_path: Path, recorded: dict[str, Any]
) -> None:
    recorded["hidden_states"][2:, 5] *= factor
    result = check(MODELS / "gpt2", tmp_path / "run")
    assert result.exit_code == 1
    assert f"error: diverges from transformers at block 1 ({shown})" in result.output
    assert list(tmp_path.iterdir()) == []


def test_transformers_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rungs.huggingface.transformers_check.require_transformers", lambda _: None)
    result = check(MODELS / "llama", tmp_path / "run")
    assert isinstance(result.exception, RunFailure)
    assert "because transformers failed: ModuleNotFound" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_errors_are_relative_to_the_norm_of_each_token() -> None:
    states = np.asarray([[1e6, 0], [0, 1.0]], np.float32)
    other = states + np.asarray([[1.0, 0], [0, 0.01]], np.float32)
    assert relative_difference(other, states) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("window", "context", "length"),
    [(None, 4096, 64), (None, 20, 20), (512, 4096, 576), (4096, 32768, 1040)],
)
def test_the_sample_is_longer_than_the_window_if_affordable(
    window: int | None, context: int, length: int
) -> None:
    model = model_config(sliding_window=window, context_length=context, positions="rope")
    assert len(sample_tokens(model)) == length


# Token ids


@pytest.mark.parametrize("name", ["gemma", "gpt2", "llama3", "mistral", "qwen"])
def test_equal_tokenizers_have_no_difference(name: str, tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / name, name)
    ids = ids_of(folder, [*TEXTS, "a <s>b"])
    assert list(differences(load_tokenizer(folder), ChatTemplate.find(folder), ids)) == []


def test_each_kind_of_difference_is_named(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "llama3", "llama3")
    tokenizer, template = load_tokenizer(folder), ChatTemplate.find(folder)
    ids = ids_of(folder, list(TEXTS))
    del ids["plain"][0][3]
    ids["whole"][1] = ids["whole"][1][1:]
    ids["chats"][1], ids["chats"][2] = None, [1, 2]
    plain, whole, lost, refused = differences(tokenizer, template, ids)
    assert re.match(re.escape(repr(TEXTS[0])) + r" is \[[\d, ]*\] from token 3 on, in", plain)
    assert whole.startswith(f"{TEXTS[1]!r}, with what begins and ends it, is [")
    assert lost.startswith("a chat of 3 messages is [")
    assert lost.endswith("in transformers None")
    assert refused == "a chat of 4 messages is None from token 0 on, in transformers [1, 2]"
    without = list(differences(tokenizer, None, ids_of(folder, [])))
    assert without[0].startswith("a chat of 1 messages is None from token 0 on, in transformers [")


def test_a_tokenizer_that_differs_undoes_the_import(
    recorded: dict[str, Any], tmp_path: Path
) -> None:
    source = with_tokenizer(copy("gpt2", tmp_path / "source"), "gpt2", template=None)
    texts = list(TEXTS)
    ids = ids_of(source, texts) | {"chats": [None] * 3}
    recorded["ids"] = json.dumps(ids)
    result = check(source, tmp_path / "run")
    assert f"compared the ids of {len(texts)} texts and 0 chats" in result.output
    assert result.exit_code == 0, result.output
    ids["plain"][0] = [7]
    recorded["ids"] = json.dumps(ids)
    result = check(source, tmp_path / "other")
    assert result.exit_code == 1
    assert 'error: the tokenizer diverges from transformers: "The quick brown' in result.output
    assert "in transformers [7]; " in result.output
    assert not (tmp_path / "other").exists()


# With transformers itself

PYTHON = os.environ.get("RUNGS_TRANSFORMERS_PYTHON")
NEEDS_PYTHON = pytest.mark.skipif(not PYTHON, reason="RUNGS_TRANSFORMERS_PYTHON is not set")
OF_FAMILY = {"gemma2": "gemma", "llama": "llama3", "mistral": "mistral", "qwen3": "qwen"}
"""A tokenizer for some of the models. Its size doesn't matter: token ids are random."""


@pytest.mark.long
@NEEDS_PYTHON
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "mixtral"])
def test_the_check_passes(name: str, tmp_path: Path) -> None:
    source = copy(name, tmp_path / "source")
    if name in OF_FAMILY:
        with_tokenizer(source, OF_FAMILY[name])
    result = check(source, tmp_path / "run", "--python", str(PYTHON))
    assert result.exit_code == 0, f"{result.output}\n{result.exception}"
    assert "agrees with transformers: no difference is above 0.0001" in result.output
    assert (" and 2 chats" in result.output) == (name in OF_FAMILY)


def changed(**parts: Any) -> Callable[[Path], None]:
    """Return a function that changes parts of a folder's `tokenizer.json`."""

    def write(folder: Path) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        content |= {key: part(content[key]) for key, part in parts.items()}
        file.write_text(json.dumps(content))

    return write


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another tokenizer": (lambda folder: with_tokenizer(folder, "qwen"), "The quick brown fox"),
    "template": (lambda folder: with_tokenizer(folder, "llama3", OTHER_TEMPLATE), "a chat of"),
    "no template": (lambda folder: (folder / "chat_template.jinja").unlink(), "a chat of 1"),
    "first token": (changed(post_processor=lambda _: None), "with what begins and ends it,"),
}
"""What an import could get wrong, and how the check's line begins."""


@pytest.mark.long
@NEEDS_PYTHON
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_tokenizer_is_noticed(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, imported = copy("llama", tmp_path / "source"), tmp_path / "imported"
    with_tokenizer(source, "llama3")
    run = CliRunner().invoke(pretrained.main, ["import", str(source), str(tmp_path / "run")])
    assert run.exit_code == 0
    shutil.copytree(tmp_path / "run/checkpoints/imported", imported)
    alter, line = MISTAKES[mistake]
    alter(imported)
    monkeypatch.setattr(transformers_check, "_compare_activations", lambda *_: None)
    with pytest.raises(transformers_check.DivergenceError, match="the tokenizer diverges") as error:
        transformers_check.compare(source, imported, str(PYTHON), print)
    assert line in str(error.value)
