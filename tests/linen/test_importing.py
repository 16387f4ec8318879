"""Importing Linen checkpoints: the logits are those of the Linen model that wrote them."""

import json
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from rungs.checkpointing.load import load_model
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.huggingface.exporting import Export
from rungs.linen.checkpoint import read_arrays
from tests.support import linen_models as models
from tests.support.commands import Finished, run_script
from tests.support.published_models import MODELS, arrays

TOKENS_BS = np.random.default_rng(0).integers(0, models.VOCAB, (2, 11))
TOLERANCE = 2e-5
"""Relative to the largest logit: float32 rounding of other orders of summation."""


def make(module: nn.Module) -> tuple[dict[str, Any], jax.Array]:
    """A Linen model's parameters and its logits."""
    logits, variables = module.init_with_output(jax.random.key(1), jnp.asarray(TOKENS_BS))
    return jax.tree.map(np.asarray, variables["params"]), logits


def write_msgpack(folder: Path, params: Any, config: dict[str, Any] | None) -> Path:
    folder.mkdir()
    (folder / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(params))
    write_config(folder, config)
    return folder


def write_orbax(folder: Path, tree: Any, config: dict[str, Any] | None = None) -> Path:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
    write_config(folder, config)
    return folder


def write_config(folder: Path, config: dict[str, Any] | None) -> None:
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def import_(source: Path, run: Path, family: str) -> Finished:
    return run_script("pretrained.py", "import", source, run, "--linen", family)


def assert_logits(run: Path, wanted: jax.Array) -> None:
    found = load_model(run)(jnp.asarray(TOKENS_BS))
    scale = float(jnp.abs(wanted).max())
    np.testing.assert_allclose(found / scale, wanted / scale, atol=TOLERANCE)


@pytest.mark.parametrize(("family", "module"), [("gpt2", models.GPT2()), ("llama", models.Llama())])
@pytest.mark.parametrize("write", [write_msgpack, write_orbax])
def test_transformers_layouts(family: str, module: nn.Module, write: Any, tmp_path: Path) -> None:
    params, logits = make(module)
    source = write(tmp_path / "source", params, models.CONFIGS[family])
    done = import_(source, tmp_path / "run", family)
    assert done.returncode == 0, done.stderr
    assert_logits(tmp_path / "run", logits)


@pytest.mark.parametrize("kv_heads", [1, models.HEADS])
@pytest.mark.parametrize("transposed", [False, True])
def test_gemma_needs_no_config(kv_heads: int, transposed: bool, tmp_path: Path) -> None:
    params, logits = make(models.Gemma(kv_heads, transposed))
    source = write_orbax(tmp_path / "source", params)
    done = import_(source, tmp_path / "run", "gemma")
    assert done.returncode == 0, done.stderr
    assert_logits(tmp_path / "run", logits)
    assert Export(str(tmp_path / "run")).summary()  # its config.json was written too


def with_flat_keys(params: Any) -> Any:
    """As Google's checkpoints have them: one dict by the path of the module."""
    flat: dict[str, dict[str, np.ndarray]] = {}
    for path, array in flatten_dict(params).items():
        flat.setdefault("/".join(path[:-1]), {})[path[-1]] = array
    return flat


def with_stacked_layers(params: Any) -> Any:
    inner = dict(params["transformer"])
    layers = [inner.pop(f"layer_{number}") for number in range(models.LAYERS)]
    return {"transformer": inner | {"layers": jax.tree.map(lambda *a: np.stack(a), *layers)}}


def with_optimizer_state(params: Any) -> Any:
    return {"params": params, "opt_state": {"mu": params}, "step": np.asarray(3)}


@pytest.mark.parametrize("nest", [with_flat_keys, with_stacked_layers, with_optimizer_state])
def test_other_nestings_of_gemma(nest: Any, tmp_path: Path) -> None:
    params, logits = make(models.Gemma())
    done = import_(write_orbax(tmp_path / "source", nest(params)), tmp_path / "run", "gemma")
    assert done.returncode == 0, done.stderr
    assert_logits(tmp_path / "run", logits)


def test_shards_of_msgpack_files(tmp_path: Path) -> None:
    params, logits = make(models.Llama())
    flat = flatten_dict(params, sep="/")
    halves = [dict(list(flat.items())[part::2]) for part in range(2)]
    folder = tmp_path / "source"
    folder.mkdir()
    names = [f"flax_model-{number:05d}-of-00002.msgpack" for number in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        (folder / name).write_bytes(flax.serialization.to_bytes(half))
    places = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (folder / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": places}))
    write_config(folder, models.CONFIGS["llama"])
    assert import_(folder, tmp_path / "run", "llama").returncode == 0
    assert_logits(tmp_path / "run", logits)


def test_a_file_in_bfloat16_keeps_its_dtype(tmp_path: Path) -> None:
    params, _ = make(models.GPT2())
    narrow = jax.tree.map(lambda array: array.astype(ml_dtypes.bfloat16), params)
    source = write_msgpack(tmp_path / "source", narrow, models.CONFIGS["gpt2"])
    assert import_(source / "flax_model.msgpack", tmp_path / "run", "gpt2").returncode == 0
    weights = Weights(tmp_path / "run/checkpoints/imported/model.safetensors")
    found = weights.array("blocks.feed_forward.up.kernel")
    wanted = narrow["transformer"]["h"]["1"]["mlp"]["c_fc"]["kernel"]
    np.testing.assert_array_equal(found[1], wanted.T)
    assert found.dtype == ml_dtypes.bfloat16


def test_padding_after_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    params, logits = make(models.Gemma())
    table = params["transformer"]["embedder"]["input_embedding"]
    padded = np.concatenate([table, np.zeros((8, models.WIDTH), np.float32)])
    params["transformer"]["embedder"]["input_embedding"] = padded
    config = models.CONFIGS["llama"] | {
        "model_type": "gemma",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    source = write_orbax(tmp_path / "source", params, config)
    done = import_(source, tmp_path / "run", "gemma")
    assert "left out: 8 rows of the embedding after the vocabulary" in done.stdout, done.stderr
    assert_logits(tmp_path / "run", logits)


def as_google_has_them(name: str) -> dict[str, np.ndarray]:
    """A committed Hugging Face model in Gemma's own layout."""
    config = json.loads((MODELS / name / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = arrays(MODELS / name)
    found = {
        "transformer/embedder/input_embedding": tensors["model.embed_tokens.weight"],
        "transformer/final_norm/scale": tensors["model.norm.weight"],
    }
    for number in range(config["num_hidden_layers"]):
        layer = {
            key.removeprefix(f"model.layers.{number}.").removesuffix(".weight"): array
            for key, array in tensors.items()
        }

        def per_head(key: str, count: int, layer: Any = layer) -> np.ndarray:
            outputs, inputs = layer[f"self_attn.{key}_proj"].shape
            split = layer[f"self_attn.{key}_proj"].reshape(count, outputs // count, inputs)
            return np.swapaxes(split, 1, 2)

        o_proj = layer["self_attn.o_proj"]
        ours = {
            "attn/q_einsum/w": per_head("q", heads),
            "attn/kv_einsum/w": np.stack([per_head("k", kv_heads), per_head("v", kv_heads)]),
            "attn/attn_vec_einsum/w": o_proj.T.reshape(heads, -1, len(o_proj)),
            "mlp/gating_einsum/w": np.stack([layer["mlp.gate_proj"], layer["mlp.up_proj"]]),
            "mlp/linear/w": layer["mlp.down_proj"].T,
            "pre_attention_norm/scale": layer["input_layernorm"],
            "post_attention_norm/scale": layer["post_attention_layernorm"],
            "pre_ffw_norm/scale": layer["pre_feedforward_layernorm"],
            "post_ffw_norm/scale": layer["post_feedforward_layernorm"],
        }
        if name == "gemma3":
            ours["attn/_query_norm/scale"] = layer["self_attn.q_norm"]
            ours["attn/_key_norm/scale"] = layer["self_attn.k_norm"]
        found |= {f"transformer/layer_{number}/{path}": array for path, array in ours.items()}
    return found


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_later_gemmas_give_the_weights_of_their_twins(name: str, tmp_path: Path) -> None:
    config = json.loads((MODELS / name / "config.json").read_text())
    linen = write_msgpack(tmp_path / "source", as_google_has_them(name), config)
    assert import_(linen, tmp_path / "run", "gemma").returncode == 0
    run_script("pretrained.py", "import", MODELS / name, tmp_path / "twin")
    file = "checkpoints/imported/model.safetensors"
    found, wanted = Weights(tmp_path / "run" / file), Weights(tmp_path / "twin" / file)
    assert set(found.names()) == set(wanted.names())
    for key in wanted.names():
        np.testing.assert_array_equal(found.array(key), wanted.array(key), err_msg=key)


def test_later_gemmas_need_a_config(tmp_path: Path) -> None:
    linen = write_msgpack(tmp_path / "source", as_google_has_them("gemma2"), None)
    assert "config.json: missing; " in refusal(linen, tmp_path / "run", "gemma")


# Bad input


def refusal(source: Path, run: Path, family: str) -> str:
    """The one line that a command says, having left nothing behind."""
    done = import_(source, run, family)
    assert done.returncode == 2, done
    assert not run.exists()
    [line] = done.stderr.splitlines()
    return line


def test_a_missing_config(tmp_path: Path) -> None:
    params, _ = make(models.GPT2())
    source = write_msgpack(tmp_path / "source", params, None)
    assert "config.json: missing; " in refusal(source, tmp_path / "run", "gpt2")


def test_a_damaged_file(tmp_path: Path) -> None:
    params, _ = make(models.GPT2())
    source = write_msgpack(tmp_path / "source", params, models.CONFIGS["gpt2"])
    path = source / "flax_model.msgpack"
    path.write_bytes(path.read_bytes()[:-100])
    assert "not a complete msgpack file of Flax" in refusal(source, tmp_path / "run", "gpt2")
    path.write_bytes(flax.serialization.msgpack_serialize([1, 2]))
    assert "holds no tree of arrays" in refusal(source, tmp_path / "run", "gpt2")


def test_a_damaged_orbax_folder(tmp_path: Path) -> None:
    source = write_orbax(tmp_path / "source", make(models.Gemma())[0])
    (source / "_METADATA").write_text("{}")
    assert "not a complete Orbax checkpoint" in refusal(source, tmp_path / "run", "gemma")


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    write_orbax(tmp_path / "2b", make(models.Gemma())[0])
    line = refusal(tmp_path, tmp_path / "run", "gemma")
    assert "it has neither flax_model.msgpack nor Orbax's files; is it in 2b?" in line


def test_a_place_that_does_not_exist(tmp_path: Path) -> None:
    assert "download the checkpoint first" in refusal(tmp_path / "none", tmp_path / "run", "gpt2")


def test_another_familys_checkpoint(tmp_path: Path) -> None:
    source = write_msgpack(tmp_path / "source", make(models.Llama())[0], models.CONFIGS["gpt2"])
    done = import_(source, tmp_path / "run", "gpt2")
    assert done.returncode == 2
    assert "missing" in done.stderr


def test_a_layer_as_wide_as_the_embedding(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(models, "HIDDEN", models.WIDTH)
    source = write_orbax(tmp_path / "source", make(models.Gemma())[0])
    assert "can't tell inputs from outputs" in refusal(source, tmp_path / "run", "gemma")


def test_links_out_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    params, _ = make(models.GPT2())
    of_file = write_msgpack(tmp_path / "file", params, None)
    of_folder = write_orbax(tmp_path / "folder", params)
    elsewhere = tmp_path / "elsewhere"
    for path in (of_file / "flax_model.msgpack", of_folder / "_METADATA", of_folder / "d"):
        path.symlink_to(path.rename(elsewhere))
        with pytest.raises(UserError, match=f"{path}: is a link out of its folder"):
            read_arrays(path.parent)
        path.unlink()
        elsewhere.rename(path)
    assert read_arrays(of_folder).keys() == read_arrays(of_file).keys()
