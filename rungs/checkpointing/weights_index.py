"""Which tensor is in which safetensors file: one file, or shards with an index.

File names and index have the format of the Hugging Face hub.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.common.paths import is_file, is_plain_name, is_there

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def place_tensors(sizes: Mapping[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, in order, by file name.

    All tensors go into one file, or into shards of at most `max_file_bytes`; a larger tensor gets
    a shard of its own. Gives the same shards as
    `huggingface_hub.split_state_dict_into_shards_factory`.

    Args:
        sizes: bytes of each tensor, by name.
        max_file_bytes: limit for the tensors in a file.
    """
    shards = _shards(sizes, max_file_bytes)
    if len(shards) < 2:
        return {WEIGHTS_FILE: list(sizes)}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def write_index(folder: Path, files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> None:
    """Write the index for the result of `place_tensors`; a single file needs none."""
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX_FILE).write_text(text, encoding="utf-8")


def read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor; raise UserError if the index is missing or damaged."""
    text = strict_json.read_text(path)
    try:
        names = json.loads(text)["weight_map"]
        files = {name: path.parent / file for name, file in names.items() if is_plain_name(file)}
        is_valid = len(files) == len(names) > 0
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise UserError(
            f"{path}: damaged; it must have a weight_map from tensor names to names of files in the"
            " same folder"
        )
    return files


def file_or_index(path: Path) -> Path:
    """Return the index if `path` is a `model.safetensors` that exists as shards, else `path`."""
    index = path.parent / INDEX_FILE
    is_sharded = path.name == WEIGHTS_FILE and not is_there(path) and is_file(index)
    return index if is_sharded else path


def _shards(sizes: Mapping[str, int], max_file_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = []
    shard, room = list[str](), max_file_bytes
    for name, size in sizes.items():
        if size > max_file_bytes:
            shards.append([name])
            continue
        if size > room:
            shards.append(shard)
            shard, room = [], max_file_bytes
        shard.append(name)
        room -= size
    return [*shards, shard] if shard else shards
