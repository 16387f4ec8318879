"""Weights in MXFP4: what their bits mean, and a GPT-OSS that has them."""

import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.huggingface.exporting import Export
from rungs.huggingface.importing import Import, find_source, import_model
from rungs.huggingface.mxfp4 import unpack
from tests.huggingface.test_exporting import from_scratch
from tests.support.published_models import arrays, assert_same, copy

GPT_OSS = {
    **{"emb_dim": 64, "n_heads": 2, "positions": "rope", "norm": "rms_norm", "ffn_dim": 32},
    **{"attention_sinks": True, "qkv_bias": True, "feed_forward": "swiglu_clamped"},
    **{"n_experts": 2, "experts_per_token": 1, "expert_routing": {"router_bias": True}},
}


def value_of(code: int) -> float:
    """Return what 4 bits mean: a sign, two bits of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if sign else size


def packed(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return blocks and scales, and the values that they stand for, of a shape whose last axis is
    along the blocks."""
    codes = rng.integers(16, size=(*shape[:-1], shape[-1] // 32, 32))
    scales = rng.integers(118, 131, size=codes.shape[:-1]).astype(np.uint8)
    values = np.vectorize(value_of)(codes) * 2.0 ** (scales.astype(int)[..., None] - 127)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return blocks, scales, values.reshape(shape)


def test_bits_are_unpacked_exactly() -> None:
    blocks, scales, values = packed(np.random.default_rng(0), 2, 5, 96)
    found = unpack(blocks, scales)
    assert found.dtype == ml_dtypes.bfloat16
    assert (found.astype(np.float64) == values.swapaxes(1, 2)).all()
    assert np.signbit(found.astype(np.float32)).any()


def test_a_model_with_packed_experts_is_imported_and_comes_back_in_bfloat16(tmp_path: Path) -> None:
    place, _ = from_scratch(tmp_path / "made", **GPT_OSS)
    whole = tmp_path / "whole"
    whole.mkdir()
    Export(str(place)).write(whole)
    rng = np.random.default_rng(1)
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays(whole).items()}
    stored = dict(tensors)
    for layer, (part, (rows, columns)) in itertools.product(
        range(2), {"gate_up": (64, 64), "down": (64, 32)}.items()
    ):
        name = f"model.layers.{layer}.mlp.experts.{part}_proj"
        blocks, scales, values = packed(rng, 2, rows, columns)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = values.swapaxes(1, 2).astype(ml_dtypes.bfloat16)
    config = json.loads((whole / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    source = copy("gpt-oss", tmp_path / "packed", stored, **config, quantization_config=method)
    import_model(Import.from_source(find_source(str(source))), tmp_path / "run")
    gate = Weights(tmp_path / "run/checkpoints/imported/model.safetensors").array(
        "blocks.feed_forward.gate.kernel"
    )
    wanted = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert (gate[1] == wanted[:, :, 0::2]).all()
    again = tmp_path / "again"
    again.mkdir()
    Export(str(tmp_path / "run")).write(again)
    assert_same(arrays(again), tensors)
    assert "quantization_config" not in json.loads((again / "config.json").read_text())


def test_another_quantization_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    source = copy("gpt-oss", tmp_path / "fp8", {}, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match=r'quantization_config: .*must be "mxfp4"'):
        Import.from_source(find_source(str(source)))
