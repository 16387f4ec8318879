"""Read the arrays of Flax Linen checkpoints.

A msgpack file is what `flax.serialization.to_bytes` writes; transformers calls it
`flax_model.msgpack`, or splits it into shards with an index. An Orbax checkpoint is a folder.
Reading either runs no code of the checkpoint.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rungs.checkpointing.optimizer_state import literal_path
from rungs.checkpointing.weights_index import read_index
from rungs.common.errors import UserError, reason
from rungs.common.paths import is_file, is_folder, refuse_link_out, require_regular

MSGPACK_FILE, MSGPACK_INDEX = "flax_model.msgpack", "flax_model.msgpack.index.json"
_ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "checkpoint")
_COLLECTION = "params/"

Arrays = dict[str, np.ndarray]
"""By path, such as `transformer/h/0/ln_1/scale`."""


def read_arrays(place: Path) -> Arrays:
    """Return all arrays of a checkpoint, in memory; of a checkpoint with several collections, or
    with optimizer state, its `params`.

    Args:
        place: a msgpack file, a folder with one, or an Orbax folder.

    Raises:
        UserError: it is none of these, or is damaged.
    """
    arrays = dict(_flatten(_read(place)))
    inner = {name.removeprefix(_COLLECTION): a for name, a in arrays.items() if _is_param(name)}
    return inner or arrays


def _is_param(name: str) -> bool:
    return name.startswith(_COLLECTION)


def _read(place: Path) -> Mapping[str, Any]:
    if is_file(place):
        return _read_msgpack(place)
    if is_file(place / MSGPACK_FILE):
        return _read_msgpack(_within(place, place / MSGPACK_FILE))
    if is_file(place / MSGPACK_INDEX):
        shards = sorted(set(read_index(place / MSGPACK_INDEX).values()))
        return {
            name: node
            for path in shards
            for name, node in _flatten(_read_msgpack(_within(place, path)))
        }
    if any(is_file(place / name) for name in _ORBAX_FILES):
        return _read_orbax(place)
    inner = (
        sorted(path.name for path in place.iterdir() if path.is_dir()) if is_folder(place) else []
    )
    hint = f"; is it in {', '.join(inner[:5])}?" if inner else ""
    problem = f"not a Linen checkpoint: it has neither {MSGPACK_FILE} nor Orbax's files"
    raise UserError(f"{place}: {problem}{hint}")


def _within(folder: Path, path: Path) -> Path:
    """Return a path in a checkpoint; raise UserError if it is a link out of its folder."""
    refuse_link_out(path, folder)
    return path


def _read_msgpack(path: Path) -> Mapping[str, Any]:
    from flax import serialization

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
        _within(folder, path)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            place = literal_path(folder)
            metadata = checkpointer.metadata(place)
            tree = metadata.item_metadata.tree
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
