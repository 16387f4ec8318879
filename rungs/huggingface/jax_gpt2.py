"""Run folders of jax-gpt2-from-scratch (https://github.com/gpjt/jax-gpt2-from-scratch): reads and
writes weights of its last version, with norms before attention and feed-forward. Its checkpoints
are like those of Rungs, but the parameters have other names, and its layer norm divides by
σ + 1e-5. Ours divides by √(σ² + epsilon), here with an epsilon next to nothing, so that what it
returns is larger by 1e-5 ÷ σ."""

import json
import re
from pathlib import Path

import numpy as np

from rungs.checkpointing.weights_file import WEIGHTS_FILE, TensorSpec, TensorWriter
from rungs.common import strict_json
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import MODEL_FILE
from rungs.huggingface.config_keys import HFConfig, SameValue
from rungs.huggingface.exporting import Export
from rungs.huggingface.families.family import Family, Rule, as_is
from rungs.huggingface.tensors import TensorFolder

MODEL_TYPE = "jax-gpt2-from-scratch"
META_FILE, STEP = "meta.json", "global_step"
_KEYS = ("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers", "qkv_bias")
_LAYERS = "transformers_layers.layers.{layer}"
_EPSILON = 1e-10


def _module(name: str, ours: str, *parts: str) -> tuple[Rule, ...]:
    return tuple(as_is(f"{name}.{part}", f"{ours}.{part}") for part in parts)


FAMILY = Family(
    MODEL_TYPE,
    "GPTModel",
    tuple(
        SameValue(key, key)
        for key in (*_KEYS, "positions", "norm", "attention_output_bias", "feed_forward")
    ),
    {"norm_epsilon": _EPSILON, "ffn_bias": True},
    (
        *_module("token_embedding", "token_embedding", "embedding"),
        *_module("position_embedding", "position_embedding", "embedding"),
        *_module("output_norm", "final_norm", "scale", "bias"),
        *_module("output_head", "head", "kernel"),
        *_module(f"{_LAYERS}.attention_norm", "blocks.attention_norm", "scale", "bias"),
        *_module(f"{_LAYERS}.ffn_norm", "blocks.feed_forward_norm", "scale", "bias"),
        *_module(f"{_LAYERS}.attention.W_q", "blocks.attention.query", "kernel", "bias"),
        *_module(f"{_LAYERS}.attention.W_k", "blocks.attention.key", "kernel", "bias"),
        *_module(f"{_LAYERS}.attention.W_v", "blocks.attention.value", "kernel", "bias"),
        *_module(
            f"{_LAYERS}.attention.output_projection", "blocks.attention.output", "kernel", "bias"
        ),
        *_module(f"{_LAYERS}.ffn.layers.0", "blocks.feed_forward.up", "kernel", "bias"),
        *_module(f"{_LAYERS}.ffn.layers.2", "blocks.feed_forward.down", "kernel", "bias"),
    ),
    prefix="",
    buffers=((r"dropout\.rngs\..*", "states of random numbers"),),
)


def find_checkpoint(folder: Path) -> Path | None:
    """Return the best or latest checkpoint of a run folder that the program wrote, `folder` if it
    is one itself, or None."""
    checkpoints = folder / "checkpoints"
    others = sorted(checkpoints.glob("*"), reverse=True)
    for place in (checkpoints / "best", checkpoints / "latest", *others, folder):
        if (place / WEIGHTS_FILE).is_file() and is_meta(place / META_FILE):
            return place.resolve()
    return None


def is_meta(path: Path) -> bool:
    """Whether a `meta.json` is of that program; ours have a checksum of their own."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(meta, dict) and STEP in meta and "own_checksum" not in meta


class JaxGPT2Tensors(TensorFolder):
    """A checkpoint's tensors, without the axes of size 1 that its norms have."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.specs = {
            name: spec._replace(shape=spec.shape[2:] if spec.shape[:2] == (1, 1) else spec.shape)
            for name, spec in self.specs.items()
        }

    def bits(self, name: str) -> np.ndarray:
        """Return a tensor's content as unsigned integers."""
        return super().bits(name).reshape(self.specs[name].shape)

    def config(self, folder: Path) -> HFConfig:
        """Return the run's `model.json`, with what the tensors say of the stage of the model.
        Raises UserError if the file is missing or wrong; its keys are keys of ours."""
        path = folder.parents[1] / MODEL_FILE
        model = strict_json.parse(strict_json.read_text(path), path, ModelConfig)
        names = " ".join(self.specs)
        layers = set(re.findall(r"transformers_layers\.layers\.(\d+)", names))
        values = {key: getattr(model, key) for key in _KEYS} | {
            "model_type": MODEL_TYPE,
            "n_layers": len(layers),
            "positions": "learned" if "position_embedding" in names else "none",
            "norm": "layer_norm" if "output_norm" in names else "none",
            "attention_output_bias": "output_projection.bias" in names,
            "feed_forward": "gelu_tanh" if "ffn.layers.0" in names else "none",
        }
        return HFConfig(path, values)


def export(place: str, folder: Path) -> None:
    """Write `model.json` and `model.safetensors` as that program has them into an empty folder.
    Raises UserError if it can't express the model."""
    plan = Export(place, (FAMILY,))
    model = plan.choice.model
    shapes = {
        name: (1, 1, *spec.shape) if name.split(".")[-2].endswith("norm") else spec.shape
        for name, spec in plan.specs.items()
    }
    specs = {name: TensorSpec("float32", shape) for name, shape in shapes.items()}
    with TensorWriter(folder / WEIGHTS_FILE, specs, {}) as writer:
        for group in plan.groups:
            for name, tensor in plan.tensors(group):
                writer.write(name, tensor.reshape(shapes[name]))
    keys = {key: getattr(model, key) for key in _KEYS}
    (folder / MODEL_FILE).write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
