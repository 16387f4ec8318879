"""A Flax Linen checkpoint, read as if it were a Hugging Face model.

A msgpack file is what `flax.serialization.to_bytes` writes; transformers calls it
`flax_model.msgpack`, or splits it into shards with an index. An Orbax checkpoint is a folder.
Reading either runs no code of the checkpoint.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rungs.checkpointing.optimizer_state import literal_path
from rungs.checkpointing.weights_file import TensorSpec, bits, read_index
from rungs.common.errors import UserError, reason
from rungs.common.paths import is_file, is_folder, refuse_link_out, require_regular
from rungs.config.option_values import LinenFamily
from rungs.linen.layouts import LAYOUTS, Arrays

MSGPACK_FILE, MSGPACK_INDEX = "flax_model.msgpack", "flax_model.msgpack.index.json"
_ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "checkpoint")
_COLLECTION = "params/"
_TOKEN_EMBEDDING = "model.embed_tokens.weight"


class LinenTensors:
    """A Linen checkpoint with the interface of `TensorFolder`. It is in memory as a whole.

    Args:
        place: a msgpack file, or the folder of a checkpoint.
        family: whose layout the checkpoint has.

    Attributes:
        specs: dtype and shape of each tensor, by name.
        config: the `config.json` that the shapes imply; None if they imply none.

    Raises:
        UserError: no checkpoint, a damaged one, or one that is ambiguous.
    """

    def __init__(self, place: Path, family: LinenFamily) -> None:
        layout, arrays = LAYOUTS[family], read_arrays(place)
        try:
            self._tensors = layout.rename(arrays)
            self.config: dict[str, Any] | None = layout.config(arrays)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        except (KeyError, ValueError, IndexError):
            problem = f"doesn't have the layout of {family}: it has {', '.join(sorted(arrays)[:5])}"
            raise UserError(f"{place}: {problem}, …") from None
        items = self._tensors.items()
        self.specs = {name: TensorSpec(array.dtype.name, array.shape) for name, array in items}

    def leave_out_padding(self, vocab_size: int) -> list[str]:
        """Drop the embedding's rows after the vocabulary, which Gemma 1 was published with. Return
        notes on what was left out."""
        padded = self._tensors.get(_TOKEN_EMBEDDING)
        if padded is None or len(padded) <= vocab_size:
            return []
        table = self._tensors[_TOKEN_EMBEDDING] = padded[:vocab_size]
        self.specs[_TOKEN_EMBEDDING] = TensorSpec(table.dtype.name, table.shape)
        return [f"left out: {len(padded) - vocab_size} rows of the embedding after the vocabulary"]

    def bits(self, name: str) -> np.ndarray:
        """Return the content of a tensor, as unsigned integers."""
        return bits(self._tensors[name])


def read_arrays(place: Path) -> Arrays:
    """Return all arrays of a checkpoint, in memory; if it has `params`, those alone.

    Args:
        place: a msgpack file, a folder with one, or an Orbax folder.

    Raises:
        UserError: it is none of these, or is damaged.
    """
    arrays = dict(_flatten(_read(place)))
    names = [name for name in arrays if name.startswith(_COLLECTION)]
    return {name.removeprefix(_COLLECTION): arrays[name] for name in names} or arrays


def _read(place: Path) -> Mapping[str, Any]:
    if is_file(place):
        return _read_msgpack(place)
    if is_file(place / MSGPACK_FILE):
        return _read_msgpack(place / MSGPACK_FILE, place)
    if is_file(place / MSGPACK_INDEX):
        shards = sorted(set(read_index(place / MSGPACK_INDEX).values()))
        trees = (_read_msgpack(path, place) for path in shards)
        return {name: node for tree in trees for name, node in _flatten(tree)}
    if any(is_file(place / name) for name in _ORBAX_FILES):
        return _read_orbax(place)
    children = place.iterdir() if is_folder(place) else ()
    inner = sorted(path.name for path in children if path.is_dir())
    raise UserError(
        f"{place}: not a Linen checkpoint: it has neither {MSGPACK_FILE} nor Orbax's files"
        + (f"; is it in {', '.join(inner[:5])}?" if inner else "")
    )


def _read_msgpack(path: Path, folder: Path | None = None) -> Mapping[str, Any]:
    """Read a file, which may not be a link out of the folder that it is read for."""
    from flax import serialization

    if folder is not None:
        refuse_link_out(path, folder)
    try:
        require_regular(path)
        tree = serialization.msgpack_restore(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the download or copy is incomplete") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path}: not a complete msgpack file of Flax: {reason(error)}") from None
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: holds no tree of arrays")
    return tree


def _read_orbax(folder: Path) -> Mapping[str, Any]:
    """Read onto the host, whatever devices the checkpoint was saved from."""
    import jax
    import orbax.checkpoint as ocp

    for path in folder.rglob("*"):
        refuse_link_out(path, folder)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            place = literal_path(folder)
            tree = checkpointer.metadata(place).item_metadata.tree
            to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            restored: Mapping[str, Any] = checkpointer.restore(place, restore_args=to_host)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: not a complete Orbax checkpoint: {reason(error)}") from None
    return restored


def _flatten(tree: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of nested dicts and lists. Keys may have slashes, as Gemma's do."""
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from _flatten(child, f"{path}/{key}" if path else str(key))
    elif tree is not None:
        yield path, np.asarray(tree)
