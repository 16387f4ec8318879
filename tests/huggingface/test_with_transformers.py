"""`pretrained.py import --check` with transformers itself, for every family. It takes a Python with
PyTorch and transformers: `RUNGS_TRANSFORMERS_PYTHON=PATH uv run pytest` this file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rungs.cli import pretrained
from rungs.huggingface import transformers_check
from tests.support.published_models import MODELS, NAMES, copy

PYTHON = os.environ.get("RUNGS_TRANSFORMERS_PYTHON")
TOKENIZERS = MODELS.parent / "tokenizers"
OF_FAMILY = {"gemma2": "gemma", "llama": "llama3", "mistral": "mistral", "qwen3": "qwen"}
"""A tokenizer for some of the models. Its size doesn't matter: token ids are random."""
TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="RUNGS_TRANSFORMERS_PYTHON is not set"),
]


def add_tokenizer(folder: Path, name: str) -> None:
    for file in (TOKENIZERS / name).iterdir():
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@pytest.mark.parametrize("name", NAMES)
def test_the_check_passes(name: str, tmp_path: Path) -> None:
    source = copy(name, tmp_path / "source")
    if name in OF_FAMILY:
        add_tokenizer(source, OF_FAMILY[name])
    arguments = ["import", str(source), str(tmp_path / "run"), "--check", "--python", str(PYTHON)]
    result = CliRunner().invoke(pretrained.main, arguments)
    assert result.exit_code == 0, f"{result.output}\n{result.exception}"
    assert "agrees with transformers: no difference is above 0.0001" in result.output
    assert ("and 3 chats" in result.output) == (name in OF_FAMILY)


def change(file: str, *path: str | int, to: object) -> Callable[[Path], None]:
    """Return a function that gives one place of a JSON file of a folder another value."""

    def write(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        place = content
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to
        (folder / file).write_text(json.dumps(content))

    return write


def forget_special_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"] = content["added_tokens"][:1]
    file.write_text(json.dumps(content))


def swap_merges(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"].reverse()
    file.write_text(json.dumps(content))


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace(" | trim", ""))


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


SWAPS: dict[str, tuple[Callable[[Path], None], str]] = {
    "another tokenizer": (lambda folder: add_tokenizer(folder, "qwen"), "The quick brown fox"),
    "special tokens": (forget_special_tokens, "b' is"),
    "merges": (swap_merges, "The quick brown fox"),
    "template": (other_template, "a chat of 3 messages is"),
    "no template": (no_template, "a chat of 1 message is refused"),
    "normalizer": (change("tokenizer.json", "normalizer", to={"type": "NFC"}), "'Cafe\u0301"),
    "first token": (
        change("tokenizer.json", "post_processor", to=None),
        "with what begins and ends it,",
    ),
}
"""What an import could get wrong, and how the check's line begins."""


@pytest.mark.parametrize("swapped", SWAPS)
def test_a_wrong_tokenizer_is_noticed(
    swapped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, imported = copy("llama", tmp_path / "source"), tmp_path / "imported"
    add_tokenizer(source, "llama3")
    shutil.copytree(source, imported)
    alter, line = SWAPS[swapped]
    alter(imported)
    monkeypatch.setattr(transformers_check, "_compare_activations", lambda *_: None)
    with pytest.raises(transformers_check.DivergenceError) as error:
        transformers_check.compare(source, imported, str(PYTHON), print)
    assert str(error.value).startswith("the tokenizer diverges from transformers: ")
    assert line in str(error.value)
