"""`pretrained.py import --check` with transformers itself, for every family. It takes a Python with
PyTorch and transformers: `RUNGS_TRANSFORMERS_PYTHON=PATH uv run pytest` this file."""

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import pretrained
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


@pytest.mark.parametrize("name", NAMES)
def test_the_check_passes(name: str, tmp_path: Path) -> None:
    source = copy(name, tmp_path / "source")
    if name in OF_FAMILY:
        for file in (TOKENIZERS / OF_FAMILY[name]).iterdir():
            shutil.copy(file, source)
        (source / "chat_template.jinja").write_text(TEMPLATE)
    arguments = ["import", str(source), str(tmp_path / "run"), "--check", "--python", str(PYTHON)]
    result = CliRunner().invoke(pretrained.main, arguments)
    assert result.exit_code == 0, f"{result.output}\n{result.exception}"
    assert "agrees with transformers: no difference is above 0.0001" in result.output
    assert ("and 3 chats" in result.output) == (name in OF_FAMILY)
