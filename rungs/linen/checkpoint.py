"""A Flax Linen checkpoint, read like a Hugging Face model without running its code: a msgpack file,
as from `flax.serialization.to_bytes` or transformers (`flax_model.msgpack`, possibly in shards with
an index), or an Orbax folder.

Axes: D width, N heads, H head size, F feed-forward width."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rungs.checkpointing import weights_file
from rungs.checkpointing.weights_file import TensorSpec, bits
from rungs.common.errors import UserError, reason
from rungs.common.paths import refuse_link_out, require_regular
from rungs.config.option_values import LinenFamily

MSGPACK_FILE, MSGPACK_INDEX = "flax_model.msgpack", "flax_model.msgpack.index.json"
_ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "checkpoint")
_COLLECTION = "params/"
_TOKEN_EMBEDDING = "model.embed_tokens.weight"
Arrays = dict[str, np.ndarray]
"""Arrays by their paths, such as `transformer/h/0/ln_1/scale`."""

_EMBEDDING = "embedder/input_embedding"
_OUTSIDE_LAYERS = {_EMBEDDING: "model.embed_tokens.weight", "final_norm/scale": "model.norm.weight"}
_LAYER = re.compile(r"layer_(\d+)/(.*)")
_VISION = ("vision_encoder/", "embedder/mm_")
_NORMS = {
    "pre_attention_norm/scale": "input_layernorm",
    "post_attention_norm/scale": "post_attention_layernorm",
    "pre_ffw_norm/scale": "pre_feedforward_layernorm",
    "post_ffw_norm/scale": "post_feedforward_layernorm",
    "attn/_query_norm/scale": "self_attn.q_norm",
    "attn/_key_norm/scale": "self_attn.k_norm",
}
_CONTEXT_LENGTH = 8192
"""Context length of Gemma 1 in tokens (Gemma Team 2024, table 1), which no array contains."""


class Layout(NamedTuple):
    """Translation of a family's layouts to Hugging Face's."""

    rename: Callable[[Arrays], Arrays]
    """Return the arrays with Hugging Face's names and shapes. Unknown paths are kept. Raises
    UserError if the layout of a shape is ambiguous."""
    config: Callable[[Arrays], dict[str, Any] | None] = lambda _: None
    """Return the `config.json` that the arrays imply; None if they don't determine it."""


def _from_transformers(arrays: Arrays) -> Arrays:
    """Translate the layout of `models/*/modeling_flax_*.py` in transformers 4.57: PyTorch's paths,
    with transposed kernels. A Dense is (inputs, outputs) and GPT-2's Conv1D (outputs, inputs), each
    the opposite of PyTorch."""
    renamed: Arrays = {}
    for path, array in arrays.items():
        *module, leaf = path.split("/")
        name = "weight" if leaf in ("kernel", "embedding", "scale") else leaf
        renamed[".".join([*module, name])] = array.T if leaf == "kernel" else array
    return renamed


def _from_gemma(arrays: Arrays) -> Arrays:
    """Translate Gemma's own layout (https://github.com/google-deepmind/gemma,
    `gemma/gm/nn/_modules.py`): projections have an axis for the heads, and layers are `layer_0`,
    `layer_1`, …, or stacked along a leading axis of `layers`, as in big_vision."""
    plain = _plain_paths(arrays)
    if _EMBEDDING not in plain:
        return _from_transformers(arrays)
    renamed: Arrays = {}
    for path, array in plain.items():
        if not _LAYER.fullmatch(path):
            name = f"vision_tower.{path}" if path.startswith(_VISION) else path
            renamed[_OUTSIDE_LAYERS.get(path, name)] = array
    for number, layer in _layers(plain).items():
        for path, array in layer.items():
            for name, part in _layer_tensors(path, array, layer):
                renamed[f"model.layers.{number}.{name}"] = part
    return renamed


def _gemma_config(arrays: Arrays) -> dict[str, Any] | None:
    """Return the `config.json` of a Gemma 1; None for others, as it is not all in their arrays."""
    arrays = _plain_paths(arrays)
    layers = _layers(arrays)
    if _EMBEDDING not in arrays or not layers or "post_ffw_norm/scale" in layers[0]:
        return None
    vocab_size, emb_dim = arrays[_EMBEDDING].shape
    n_heads, head_dim, _ = layers[0]["attn/attn_vec_einsum/w"].shape
    keys = layers[0].get("attn/kv_einsum/w")
    return {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "vocab_size": vocab_size,
        "hidden_size": emb_dim,
        "intermediate_size": len(layers[0]["mlp/linear"]),
        "num_hidden_layers": len(layers),
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_heads if keys is None else keys.shape[1],
        "head_dim": head_dim,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": _CONTEXT_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }


def _plain_paths(arrays: Arrays) -> Arrays:
    """Return the arrays with separate paths per layer, and the feed-forward matrices without the
    suffix that some versions add."""
    plain: Arrays = {}
    for path, array in arrays.items():
        path = path.removeprefix("transformer/")
        path = re.sub(r"mlp/(gating_einsum|linear)/w$", r"mlp/\1", path)
        if path.startswith("layers/"):
            rest = path.removeprefix("layers/")
            plain |= {f"layer_{number}/{rest}": part for number, part in enumerate(array)}
        else:
            plain[path] = array
    return plain


def _layers(arrays: Arrays) -> dict[int, Arrays]:
    layers = defaultdict[int, Arrays](dict)
    for path, array in arrays.items():
        if found := _LAYER.fullmatch(path):
            layers[int(found[1])][found[2]] = array
    return dict(sorted(layers.items()))


def _layer_tensors(path: str, array: np.ndarray, layer: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of one array of a layer."""
    if path == "pre_ffw_norm/scale" and "post_ffw_norm/scale" not in layer:
        yield "post_attention_layernorm.weight", array  # Gemma 1 has two norms in a layer
    elif path in _NORMS:
        yield f"{_NORMS[path]}.weight", array
    elif path == "attn/q_einsum/w":
        yield "self_attn.q_proj.weight", _projection(array)
    elif path in ("attn/kv_einsum/w", "attn/qkv_einsum/w"):
        letters = path.removeprefix("attn/").removesuffix("_einsum/w")
        for letter, part in zip(letters, array, strict=True):
            yield f"self_attn.{letter}_proj.weight", _projection(part)
    elif path == "attn/attn_vec_einsum/w":
        yield "self_attn.o_proj.weight", array.reshape(-1, array.shape[-1]).T
    elif path == "mlp/gating_einsum":
        for letter, part in zip(("gate", "up"), array, strict=True):
            yield f"mlp.{letter}_proj.weight", _outputs_first(part, layer["mlp/linear"])
    elif path == "mlp/linear":
        yield "mlp.down_proj.weight", array.T
    else:
        yield path, array


def _projection(w_NDH: np.ndarray) -> np.ndarray:
    """Return a projection as (N · H, D)."""
    return w_NDH.transpose(0, 2, 1).reshape(-1, w_NDH.shape[1])


def _outputs_first(matrix: np.ndarray, down_FD: np.ndarray) -> np.ndarray:
    """Return half of gating_einsum as (F, D). Gemma 1 and the 2B of Gemma 2 store it as (D, F), the
    others as (F, D)."""
    if down_FD.shape[0] == down_FD.shape[1]:
        raise UserError(
            "mlp/gating_einsum: can't tell inputs from outputs, as the feed-forward layer is as"
            " wide as the embedding; import a checkpoint in another layout"
        )
    return matrix if matrix.shape == down_FD.shape else matrix.T


LAYOUTS: dict[LinenFamily, Layout] = {
    "gemma": Layout(_from_gemma, _gemma_config),
    "gpt2": Layout(_from_transformers),
    "llama": Layout(_from_transformers),
}
"""The layouts of each family."""


class LinenTensors:
    """A Linen checkpoint (a msgpack file or a folder) of a family, wholly in memory, with the
    interface of `TensorFolder`. Raises UserError if it is missing, damaged or ambiguous."""

    def __init__(self, place: Path, family: LinenFamily) -> None:
        layout, arrays = LAYOUTS[family], read_arrays(place)
        try:
            self._tensors = layout.rename(arrays)
            self.config: dict[str, Any] | None = layout.config(arrays)
            """The `config.json` that the shapes imply, or None."""
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        except (KeyError, ValueError, IndexError):
            problem = f"doesn't have the layout of {family}: it has {', '.join(sorted(arrays)[:5])}"
            raise UserError(f"{place}: {problem}, …") from None
        items = self._tensors.items()
        self.specs = {name: TensorSpec(array.dtype.name, array.shape) for name, array in items}
        """dtype and shape of each tensor, by name."""

    def leave_out_padding(self, vocab_size: int) -> list[str]:
        """Drop the embedding's rows beyond the vocabulary, which Gemma 1 was published with. Return
        notes on what was dropped."""
        padded = self._tensors.get(_TOKEN_EMBEDDING)
        if padded is None or len(padded) <= vocab_size:
            return []
        table = self._tensors[_TOKEN_EMBEDDING] = padded[:vocab_size]
        self.specs[_TOKEN_EMBEDDING] = TensorSpec(table.dtype.name, table.shape)
        return [f"left out: {len(padded) - vocab_size} rows of the embedding after the vocabulary"]

    def bits(self, name: str) -> np.ndarray:
        """Return a tensor's content as unsigned integers."""
        return bits(self._tensors[name])


def read_arrays(place: Path) -> Arrays:
    """Return all arrays of a checkpoint (a msgpack file, a folder with one, or an Orbax folder), or
    only `params` if it has that. Raises UserError if there is none, or it is damaged."""
    arrays = dict(_flatten(_read(place)))
    names = [name for name in arrays if name.startswith(_COLLECTION)]
    return {name.removeprefix(_COLLECTION): arrays[name] for name in names} or arrays


def _read(place: Path) -> Mapping[str, Any]:
    if place.is_file():
        return _read_msgpack(place)
    if (place / MSGPACK_FILE).is_file():
        return _read_msgpack(place / MSGPACK_FILE, place)
    if (place / MSGPACK_INDEX).is_file():
        shards = sorted(set(weights_file.read_index(place / MSGPACK_INDEX).values()))
        trees = (_read_msgpack(path, place) for path in shards)
        return {name: node for tree in trees for name, node in _flatten(tree)}
    if any((place / name).is_file() for name in _ORBAX_FILES):
        return _read_orbax(place)
    children = place.iterdir() if place.is_dir() else ()
    inner = sorted(path.name for path in children if path.is_dir())
    raise UserError(
        f"{place}: not a Linen checkpoint: it has neither {MSGPACK_FILE} nor Orbax's files"
        + (f"; is it in {', '.join(inner[:5])}?" if inner else "")
    )


def _read_msgpack(path: Path, folder: Path | None = None) -> Mapping[str, Any]:
    """Read a file, which must not be a link out of `folder`."""
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
    """Read onto the host, regardless of the devices that saved it."""
    import jax
    import orbax.checkpoint as ocp

    for path in folder.rglob("*"):
        refuse_link_out(path, folder)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            place = folder.resolve()
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
