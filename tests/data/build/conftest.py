"""A model's folder that the tests of chats share."""

import json
from pathlib import Path

import pytest

from tests.data.text.test_chat_template import CHATML, tokenizer_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer and its chat template."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer_of(CHATML).save(folder / "tokenizer.json")
    keys = {"chat_template": CHATML["source"], "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    return folder
