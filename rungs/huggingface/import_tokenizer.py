"""The tokenizer of an imported model: a `tokenizer.json`, whatever it was published as."""

import json
from pathlib import Path
from typing import Any

from rungs.common.strict_json import read_text
from rungs.data.tokenizer import TOKENIZER_FILE
from rungs.data.tokenizer_files import load_tokenizer

SENTENCEPIECE_FILE, VOCABULARY_FILE = "tokenizer.model", "vocab.json"
DESCRIPTION_FILE = "tokenizer_config.json"


def convert_tokenizer(folder: Path) -> list[str]:
    """Have a `tokenizer.json` in a folder, where the files of a tokenizer are of another kind.

    Returns:
        Lines on what was done.

    Raises:
        UserError: they are damaged, or of a kind that cannot be converted.
    """
    if (folder / TOKENIZER_FILE).is_file():
        load_tokenizer(folder)
        return []
    if (folder / SENTENCEPIECE_FILE).is_file():
        load_tokenizer(folder).save(folder / TOKENIZER_FILE)
        _describe(folder)
        return [f"{TOKENIZER_FILE} made of {SENTENCEPIECE_FILE}; {DESCRIPTION_FILE} says so"]
    if (folder / VOCABULARY_FILE).is_file():
        load_tokenizer(folder).save(folder / TOKENIZER_FILE)
        return [f"{TOKENIZER_FILE} made of {VOCABULARY_FILE} and merges.txt"]
    return ["there is no tokenizer beside it; prompts and exports will be without"]


def _describe(folder: Path) -> None:
    """Have transformers take `tokenizer.json` as it is. The classes that it has for SentencePiece
    put a pipeline of their own in its place, which for OpenLLaMA gives other tokens."""
    path = folder / DESCRIPTION_FILE
    described = json.loads(read_text(path)) if path.is_file() else {}
    content = json.loads(read_text(folder / TOKENIZER_FILE))
    config = json.loads(read_text(folder / "config.json"))
    names = {token["id"]: token["content"] for token in content["added_tokens"]}
    special: dict[str, Any] = {
        "bos_token": names.get(_first(config.get("bos_token_id"))),
        "eos_token": names.get(_first(config.get("eos_token_id"))),
        "unk_token": content["model"].get("unk_token"),
    }
    known = {key: name for key, name in special.items() if name is not None}
    keys = known | described | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")


def _first(ids: Any) -> int | None:
    """An id, or the first of several."""
    first = next(iter(ids), None) if isinstance(ids, list) else ids
    return first if isinstance(first, int) else None
