"""Configs of Hugging Face models, read and written."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig, RopeScaling
from rungs.config.run_config import differences
from rungs.huggingface.attention_keys import shortest_period
from rungs.huggingface.config_keys import HFConfig, read_hf_config
from rungs.huggingface.families import FAMILIES, VISION_MODELS, family_of
from rungs.huggingface.families.family import linear, normal_form
from rungs.huggingface.tensors import AbstractParameter, TensorGroup
from tests.support.published_configs import PUBLISHED
from tests.support.published_models import MODELS, NAMES

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "head_dim": 8}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK3 = {"model_type": "deepseek_v3", "n_routed_experts": 16, "num_hidden_layers": 4}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.7}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "num_key_value_heads": 2}
QWEN3_5 = LLAMA | {"model_type": "qwen3_5_text", "num_key_value_heads": 2}
SMOLLM3 = LLAMA | {"model_type": "smollm3", "num_key_value_heads": 2}
YARN = {"type": "yarn", "factor": 4.0}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 4}


def read(values: dict[str, Any], ignored: tuple[str, ...] = ()) -> ModelConfig:
    hf_config = HFConfig(Path("config.json"), values)
    hf_config.ignore(ignored)
    return family_of(hf_config).to_model_config(hf_config)


def message(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        read(values)
    return str(caught.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_translated(name: str) -> None:
    published, expected = PUBLISHED[name]
    assert differences(normal_form(read(published)), normal_form(ModelConfig(**expected))) == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_config_survives_a_round_trip(name: str) -> None:
    published = read_hf_config(MODELS / name)
    family = family_of(published)
    model = family.to_model_config(published)
    written = family.to_hf_config(model)
    assert VISION_MODELS.get(published.model_type, published.model_type) == written["model_type"]
    again = HFConfig(Path("config.json"), json.loads(json.dumps(written)))
    assert family.differences(model, again) == {}


WRITTEN = json.loads((MODELS.parent / "configs.json").read_text())
"""By version of transformers: a config of each class with every attribute, and the names of all
generation settings, which earlier versions write into configs."""


@pytest.mark.parametrize("version", WRITTEN)
def test_configs_that_transformers_writes_mean_what_its_defaults_do(version: str) -> None:
    """Families that this version does not have are absent."""
    configs = dict(WRITTEN[version])
    settings = dict.fromkeys(configs.pop("generation"), 1)
    for values in configs.values():
        defaults = {key: values[key] for key in ("model_type", "text_config") if key in values}
        assert normal_form(read(settings | values)) == normal_form(read(defaults))


def test_both_layouts_of_rotary_positions_are_read() -> None:
    before: dict[str, Any] = {"rope_theta": 300, "rope_scaling": {"type": "linear", "factor": 2.0}}
    since: dict[str, Any] = {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300}
    }
    assert read(LLAMA | before) == read(LLAMA | since)
    assert read(LLAMA | since).rope_scaling == RopeScaling(type="linear", factor=2.0)
    before = {"rope_theta": 300, "rope_local_base_freq": 20, "sliding_window_pattern": 2}
    ropes: dict[str, Any] = {
        "full_attention": {"rope_type": "default", "rope_theta": 300},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20},
    }
    layers = ["sliding_attention", "full_attention"] * 2
    since = {"rope_parameters": ropes} | {"layer_types": layers}
    assert read(GEMMA3 | before) == read(GEMMA3 | since)
    assert read(GEMMA3 | since).sliding_rope_theta == 20


def test_yarn_has_the_defaults_of_the_paper() -> None:
    found = read(LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": True}})
    assert found.rope_scaling == RopeScaling(
        type="yarn",
        factor=4.0,
        low_frequency_factor=1,
        high_frequency_factor=32,
        original_context_length=128,
        attention_factor=0.1 * math.log(4) + 1,
    )
    given = {"type": "yarn", "factor": 4.0, "beta_fast": 20, "attention_factor": None}
    scaling = read(LLAMA | {"rope_scaling": given}).rope_scaling
    assert scaling is not None
    assert scaling.high_frequency_factor == 20
    assert scaling.attention_factor == pytest.approx(1.1386, abs=1e-4)


def test_deepseek_scales_scores_and_writes_what_it_reads() -> None:
    yarn = YARN | MSCALES | {"original_max_position_embeddings": 4096}
    found = read(DEEPSEEK3 | {"rope_scaling": yarn, "q_lora_rank": None})
    assert found.rope_scaling is not None
    assert (found.rope_scaling.attention_factor, found.rope_scaling.score_mscale) == (1.0, 0.7)
    assert found.latent_attention is not None
    assert found.latent_attention.query_rank is None
    assert (found.n_dense_layers, found.shared_ffn_dim, found.routing.groups) == (3, 2048, 8)
    without = read({"model_type": "deepseek_v2", "num_experts_per_tok": 2})
    assert (without.n_dense_layers, without.routing.groups) == (0, None)
    written = FAMILIES["deepseek_v2"].to_hf_config(without)
    assert (written["topk_method"], written["n_group"]) == ("greedy", 1)


def test_gpt_oss_is_stretched_by_default_and_not_to_whole_pairs() -> None:
    found = read(GPT_OSS)
    assert found.rope_scaling is not None
    assert (found.rope_scaling.factor, found.rope_scaling.whole_pairs) == (32.0, False)
    assert found.rope_theta == 150_000.0
    assert list(found.layer_kinds()) == ["sliding", "global"] * 2
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
    assert read(GPT_OSS | plain).rope_scaling is None


def test_both_layouts_of_olmo_3() -> None:
    olmo = LLAMA | {"model_type": "olmo3"}
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    before = {"rope_theta": 5e5, "rope_scaling": yarn}
    sliding = {"rope_type": "default", "rope_theta": 5e5}
    ropes = {"full_attention": {"rope_theta": 5e5} | yarn, "sliding_attention": sliding}
    found = read(olmo | before)
    assert found == read(olmo | {"rope_parameters": ropes})
    assert (found.rope_theta, found.sliding_rope_theta) == (5e5, 5e5)
    own = {"full_attention": {"rope_theta": 300.0}, "sliding_attention": {"rope_theta": 20.0}}
    found = read(olmo | {"rope_theta": 70.0, "rope_parameters": own})
    assert (found.rope_theta, found.sliding_rope_theta) == (300.0, 20.0)
    assert list(found.layer_kinds()) == ["sliding", "sliding", "sliding", "global"]
    assert read(olmo).rope_theta == 500_000.0
    assert "rope_theta: 300 is not supported; transformers 5" in message(olmo | {"rope_theta": 300})


def test_windows_of_the_upper_layers() -> None:
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
    found = read(QWEN2 | window)
    assert found.sliding_window == 5
    assert list(found.layer_kinds()) == ["global", "global", "global", "sliding"]
    assert read(QWEN2 | window | {"use_sliding_window": False}).sliding_window is None
    assert read(QWEN2 | window | {"max_window_layers": 4}).sliding_window is None


@pytest.mark.parametrize(
    ("config", "keys", "error"),
    [
        (LLAMA, {"model_type": "gpt_neox"}, 'model_type: "gpt_neox" .*are deepseek_v2'),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling: .*longrope"),
        (LLAMA, {"rope_scaling": {"type": "dynamic"}}, "must be default, linear"),
        (LLAMA, {"rope_scaling": YARN | {"mscale": 1.0}}, "mscale.*its keys are attention_factor,"),
        (LLAMA, {"rope_scaling": YARN | {"truncate": 0.5}}, "whole_pairs: 0.5 is not allowed"),
        (LLAMA, {"rope_scaling": {"type": "yarn"}}, "factor"),
        (LLAMA, {"rope_scaling": YARN | {"type": "linear", "mscale": 1}}, "rope_scaling: .*msc"),
        (LLAMA, {"rope_scaling": [1]}, "must be an object"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supp"),
        (LLAMA, {"hidden_act": "relu"}, 'hidden_act: "relu" is not supported; the values are silu'),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config: .* is not supported"),
        (LLAMA, {"auto_map": {"AutoModel": "x.y"}}, "auto_map: .* is not supported; must be null"),
        (LLAMA, {"sliding_window": 5}, "sliding_window: 5 is not supported; must be null"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved: true is not supported"),
        (LLAMA, {"per_layer_config": {"1": {}}}, "per_layer_config: .* is not supported"),
        (LLAMA, {"moe_layer_freq": 2}, r"unknown key \(value 2\).*--ignore-key moe_layer_fr"),
        (LLAMA, {"num_attention_heads": 5}, "n_heads: 5 does not divide emb_dim 32"),
        (LLAMA, {"vocab_size": "64"}, 'vocab_size: "64" is not allowed'),
        (LLAMA, {"rms_norm_eps": None}, "norm_epsilon: null is not allowed"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention: true"),
        (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types: .*; must name 4 layers"),
        (GEMMA3, {"layer_types": ["chunked_attention"] * 4}, "layer_types: .*list of sliding"),
        (GEMMA3, {"sliding_window": None}, "sliding_window: null is not supported"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern: 0 is not supported"),
        (GEMMA3, {"layer_types": [[]] * 4}, "layer_types: .*list of sliding"),
        (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: .*sliding"),
        (GEMMA3, {"rope_parameters": 3}, "rope_parameters: 3 is not supported"),
        (GEMMA3, {"rope_parameters": {"full_attention": 3}}, "rope_parameters: .*objects"),
        (GEMMA3, {"model_type": "gemma3"}, "text_config: missing; gemma3 needs it"),
        (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers: .*each of 4 layers"),
        (SMOLLM3, {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers: .*must be 0 or 1"),
        (SMOLLM3, {"no_rope_layers": 3}, "no_rope_layers: 3 is not supported"),
        (SMOLLM3, {"no_rope_layer_interval": 0}, "no_rope_layer_interval: 0 is not supported"),
        (SMOLLM3, {"use_sliding_window": True}, "use_sliding_window: true is not supported"),
        (SMOLLM3, {"sliding_window": 5}, "sliding_window: 5 is not supported"),
        (SMOLLM3, {"layer_types": ["sliding_attention"] * 4}, "layer_types: .*for all 4"),
        (
            DEEPSEEK3,
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config: .*null",
        ),
        (DEEPSEEK3, {"rms_norm_eps": 1e-5}, "rms_norm_eps: 1e-05 is not supported; must be 1e-06"),
        (DEEPSEEK3, {"topk_method": "greedy"}, 'topk_method: "greedy" .*must be noaux_tc'),
        (DEEPSEEK3, {"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported; must be 1"),
        (DEEPSEEK3, {"num_key_value_heads": 2}, "n_kv_heads: not supported with latent_attention"),
        (DEEPSEEK3, {"attention_bias": True}, "attention_bias: true is not supported"),
        (DEEPSEEK3, {"rope_scaling": {"type": "yarn"} | MSCALES}, "factor"),
        (DEEPSEEK3, {"rope_interleave": 3}, "rope_interleave: 3 is not supported"),
        (GPT_OSS, {"swiglu_limit": 5.0}, "swiglu_limit: 5.0 is not supported; must be 7.0"),
        (GPT_OSS, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .*mxfp4"),
        (QWEN3_5, {"hidden_act": "gelu"}, 'hidden_act: "gelu" .*the values are silu, swish'),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step: 2 is not supp"),
        (QWEN3_MOE, {"mlp_only_layers": [1]}, r"mlp_only_layers: \[1\] is not supp"),
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "experts_per_token: 9 is above n_experts 4"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 8}, "shared_expert.*: unknown key"),
    ],
)
def test_unsupported_keys(config: dict[str, Any], keys: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        read(config | keys)


def test_layers_without_rotation() -> None:
    assert list(read(SMOLLM3).layer_kinds()) == ["global", "global", "global", "nope"]
    found = read(SMOLLM3 | {"no_rope_layers": [0, 1, 0, 1], "no_rope_layer_interval": 3})
    assert found.layer_pattern == ("nope", "global")
    longer = read(SMOLLM3 | {"no_rope_layers": [0, 1, 0, 1, 0, 0]})  # as transformers allows
    assert longer.layer_pattern == ("nope", "global")
    assert read(SMOLLM3 | {"no_rope_layer_interval": 5}).layer_pattern is None


def test_keys_of_qwen_3_with_experts() -> None:
    found = read(QWEN3_MOE | {"sliding_window": 5})
    assert (found.n_experts, found.experts_per_token, found.ffn_dim) == (4, 2, 24)
    assert not found.normalize_expert_weights
    assert found.sliding_window is None
    assert read(QWEN3_MOE | {"norm_topk_prob": True}).normalize_expert_weights
    newer = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert read(newer | {"num_local_experts": 4}) == read(QWEN3_MOE)
    windows = read(QWEN3_MOE | {"sliding_window": 5, "use_sliding_window": True})
    assert set(windows.layer_kinds()) == {"sliding"}


@pytest.mark.parametrize(
    "key", ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"]
)
def test_unsupported_keys_of_gpt_2(key: str) -> None:
    assert f"{key}: true is not supported" in message({"model_type": "gpt2", key: True})


@pytest.mark.parametrize(
    "keys",
    [{"max_window_layers": None}, {"max_window_layers": "2"}, {"num_hidden_layers": "4"}],
    ids=str,
)
def test_invalid_keys_of_qwen_2(keys: dict[str, Any]) -> None:
    windows = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5}
    expected = "n_layers" if "num_hidden_layers" in keys else "max_window_layers"
    assert expected in message(windows | keys)


def test_keys_without_effect_are_accepted() -> None:
    """The larger GPT-2 and Gemma 2 models have such keys."""
    odd = {"n_special": 0, "predict_special_tokens": True, "output_past": True}
    gpt2 = {"model_type": "gpt2"}
    assert read(gpt2 | odd) == read(gpt2)
    others = {"_model_name_or_path": "a/b", "unk_token_id": 0, "transformers.js_config": {"x": 1}}
    assert read(gpt2 | others | {"some_token_ids": [1], "odd": None}) == read(gpt2)
    assert read(LLAMA | {"rope_interleaved": False, "is_llama_config": True}) == read(LLAMA)
    gemma2 = {"model_type": "gemma2", "sliding_window": 4096}
    assert read(gemma2 | {"sliding_window_size": 4096}) == read(gemma2)


def test_every_mistake_is_reported_in_its_own_line() -> None:
    lines = message(LLAMA | {"hidden_act": "relu", "odd": 1, "sliding_window": 5}).splitlines()
    assert len(lines) == 3


def test_an_unknown_key_can_be_ignored() -> None:
    assert read(LLAMA | {"odd": 1}, ("odd",)) == read(LLAMA)


def test_normal_form_ignores_how_a_config_is_written() -> None:
    model = ModelConfig(
        vocab_size=8, context_length=4, emb_dim=8, n_layers=2, n_heads=2, ffn_dim=32, head_dim=4
    )
    other = model.model_copy(update={"ffn_dim": None, "head_dim": None, "n_kv_heads": 2})
    assert normal_form(model) == normal_form(other.model_copy(update={"rope_theta": 5.0}))
    assert normal_form(model) != normal_form(model.model_copy(update={"qkv_bias": True}))


def test_shortest_period() -> None:
    assert shortest_period(["a", "b", "a", "b", "a"]) == ["a", "b"]
    assert shortest_period(["a", "b", "b", "a"]) == ["a", "b", "b"]
    assert shortest_period(["a"]) == ["a"]


def test_every_family_has_a_fixture() -> None:
    read_types = {read_hf_config(MODELS / name).model_type for name in NAMES}
    assert {VISION_MODELS.get(name, name) for name in read_types} == set(FAMILIES)


QUERY, KEY = AbstractParameter((3, 6, 4, 2), inputs=1), AbstractParameter((3, 6, 1, 2), inputs=1)


def test_a_joined_linear_has_the_outputs_of_its_modules_in_order() -> None:
    """As a PyTorch Linear computes them."""
    rng = np.random.default_rng(0)
    query_IHD, key_IHD = (rng.normal(size=like.shape[1:]) for like in (QUERY, KEY))
    weight, bias = linear("layers.{layer}.qk", "query", "key")
    assert (weight.hf_name, bias.hf_name) == ("layers.{layer}.qk.weight", "layers.{layer}.qk.bias")
    assert (weight.parameters, bias.parameters) == (
        ("query.kernel", "key.kernel"),
        ("query.bias", "key.bias"),
    )
    group = TensorGroup(weight, {"query.kernel": QUERY, "key.kernel": KEY})
    joined_OI = group.join([query_IHD, key_IHD])
    assert joined_OI.shape == group.shape == (10, 6)
    x_I = rng.normal(size=6)
    y_O = joined_OI @ x_I
    np.testing.assert_allclose(y_O[:8].reshape(4, 2), np.einsum("i,ihd->hd", x_I, query_IHD))
    np.testing.assert_allclose(y_O[8:].reshape(1, 2), np.einsum("i,ihd->hd", x_I, key_IHD))
    for part, whole in zip(group.split(joined_OI), (query_IHD, key_IHD), strict=True):
        np.testing.assert_array_equal(part, whole)
