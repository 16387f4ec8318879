"""The layouts in which Linen models were published, translated to Hugging Face's names and shapes.

In transformers' (`models/gpt2/modeling_flax_gpt2.py`, `models/llama/modeling_flax_llama.py` of
version 4.57) the paths are those of PyTorch, and kernels are transposed: a Dense is (inputs,
outputs) and GPT-2's Conv1D (outputs, inputs), each the opposite of its PyTorch twin.

In Gemma's own (https://github.com/google-deepmind/gemma, `gemma/gm/nn/_modules.py`) projections
have an axis for the heads, and layers are `layer_0`, `layer_1`, …, or stacked along a leading axis
of `layers`, as in big_vision.

Axes: V vocabulary, L layers, D width, N query heads, K key/value heads, H head size,
F feed-forward width.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from rungs.common.errors import UserError
from rungs.config.option_values import LinenFamily

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
"""Context length of Gemma 1 in tokens (Gemma Team 2024, table 1); no array has it."""


class Layout(NamedTuple):
    """What translates the layouts of a family."""

    rename: Callable[[Arrays], Arrays]
    """Return the arrays by Hugging Face name, in Hugging Face's shapes. A path that the layout
    doesn't have stays as it is. Raises UserError if the layout of a shape is ambiguous."""
    config: Callable[[Arrays], dict[str, Any] | None] = lambda _: None
    """Return the `config.json` that arrays imply; None if they don't say enough."""


def _from_transformers(arrays: Arrays) -> Arrays:
    renamed: Arrays = {}
    for path, array in arrays.items():
        *module, leaf = path.split("/")
        name = "weight" if leaf in ("kernel", "embedding", "scale") else leaf
        renamed[".".join([*module, name])] = array.T if leaf == "kernel" else array
    return renamed


def _from_gemma(arrays: Arrays) -> Arrays:
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
    """Return the `config.json` of a Gemma 1, None for others: their windows and the scale of their
    queries are not in their arrays."""
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
    """Return the arrays with the paths of separate layers, and the feed-forward's matrices without
    the last part that some versions add."""
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
    """Yield the tensors that an array of a layer holds."""
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
    """Return half of gating_einsum as (F, D). Gemma 1 and the 2B of Gemma 2 have it as (D, F), the
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
