"""A dataset with a tokenizer, and runs with prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from rungs.data.text.tokenizer import train_bpe
from rungs.run.folder import RunFolder
from tests.support.tiny_run import MODEL, make_dataset, make_run

VOCAB = 300
PROMPTS = ["a text", "the", ""]


@pytest.fixture(scope="session")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    train_bpe(["a text of the test"], VOCAB).save(folder / "tiny" / "tokenizer.json")
    return folder


def prompted_run(folder: Path, **train: Any) -> RunFolder:
    """Write a run folder with prompts."""
    keys = {"sample_prompts": PROMPTS, "sample_tokens": 6}
    run = make_run(folder, **keys | train)
    (folder / "model.json").write_text(json.dumps(MODEL | {"vocab_size": VOCAB}))
    return run
