"""The tokenizer of an exported model: as it was imported, or made to be loaded by transformers."""

import json
import shutil
import tempfile
from pathlib import Path

from rungs.checkpointing import load
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.data.tokenizer import TOKENIZER_FILE, Tokenizer
from rungs.data.tokenizer_files import load_tokenizer
from rungs.huggingface.importing import TOKENIZER_FILES

TokenIds = dict[str, int | None]


def write_tokenizer(
    folder: Path, weights: Weights, companions: Path | None
) -> tuple[list[str], TokenIds]:
    """Write a model's tokenizer into a folder.

    Args:
        companions: the folder of the files that were imported with it.

    Returns:
        Lines on what is lacking, and the ids of its special tokens for `config.json`.
    """
    header = weights.header
    published = companions / TOKENIZER_FILE if companions else None
    if published is not None and not published.is_file():
        published = None
    if header.train is None and not weights.path.with_name(TOKENIZER_FILE).is_file():
        return ["written without a tokenizer: it was imported without"], _special(None)
    notes = []
    try:
        tokenizer = load.load_tokenizer(weights.path)
    except UserError as error:
        if published is None:
            return [f"written without a tokenizer: {error}"], _special(None)
        notes = [f"written with the tokenizer that was imported, for want of another: {error}"]
        tokenizer = load_tokenizer(published)
    if published is not None and _same(published, tokenizer):
        for name in TOKENIZER_FILES:
            if (published.parent / name).is_file():
                shutil.copyfile(published.parent / name, folder / name)
    else:
        tokenizer.save(folder / TOKENIZER_FILE)
        _write_description(folder, tokenizer, header.model.context_length)
    return notes, _special(tokenizer)


def _special(tokenizer: Tokenizer | None) -> TokenIds:
    end = tokenizer.end_of_text if tokenizer else None
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}


def _write_description(folder: Path, tokenizer: Tokenizer, length: int) -> None:
    """What `AutoTokenizer` needs beside `tokenizer.json`."""
    keys = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.end_of_text is not None:
        end = tokenizer.decode([tokenizer.end_of_text])
        keys |= {"bos_token": end, "eos_token": end}
    text = json.dumps(keys, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _same(path: Path, tokenizer: Tokenizer) -> bool:
    """Whether a file holds a tokenizer, however it is written."""
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder) / "one.json", Path(folder) / "other.json"
        load_tokenizer(path).save(one)
        tokenizer.save(other)
        return one.read_bytes() == other.read_bytes()
