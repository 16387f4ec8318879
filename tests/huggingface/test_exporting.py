"""Exporting: imported models come back bit for bit, others in a family that can express them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.checkpointing import load
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.published import all_stop_tokens, published_folder
from rungs.checkpointing.saver import Saver
from rungs.checkpointing.weights_file import Weights, WeightsHeader, write_weights
from rungs.common.disk import atomic_folder
from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.text.tokenizer import train_bpe
from rungs.data.text.tokenizer_files import load_tokenizer, save_tokenizer
from rungs.huggingface import exporting
from rungs.huggingface.exporting import Export, choose_family
from rungs.huggingface.families import FAMILIES, VISION_MODELS
from rungs.huggingface.hf_tokenizer import describe_ends
from rungs.huggingface.importing import Import, find_source, import_model
from rungs.huggingface.tensors import model_parameters
from rungs.parallel.sharding import one_device
from rungs.run.folder import RunFolder
from rungs.step.state import create_model_and_optimizer
from tests.support.configs import ONE_FILE
from tests.support.published_models import MODELS, NAMES, Arrays, arrays, assert_same, copy
from tests.support.written_checkpoints import checkpoint_meta

SMALL = {"vocab_size": 300, "context_length": 16, "emb_dim": 8, "n_layers": 2, "n_heads": 2}
LLAMA = SMALL | {
    "positions": "rope",
    "norm": "rms_norm",
    "feed_forward": "swiglu",
    "attention_output_bias": False,
    "ffn_bias": False,
}
MOE = {"n_experts": 4, "experts_per_token": 2, "qk_norm": True, "normalize_expert_weights": False}
OLMO = {"norm_placement": "output", "qk_norm": True, "qk_norm_scope": "all_heads"}
GEMMA = LLAMA | {
    "norm": "rms_norm_plus_one",
    "feed_forward": "geglu_tanh",
    "embedding_scale": "sqrt_emb_dim",
}
AROUND = {"norm_placement": "around", "qk_norm": True}
WINDOW: dict[str, Any] = {"sliding_window": 4, "layer_pattern": ["global", "sliding"]}


def imported(name: str, target: Path, source: Path | None = None) -> RunFolder:
    import_model(Import.from_source(find_source(str(source or MODELS / name))), target)
    return RunFolder(target)


def exported(place: Path, folder: Path) -> list[str]:
    with atomic_folder(folder) as partial:
        return Export(str(place)).write(partial)


def train_settings(**keys: Any) -> TrainConfig:
    needed = {"dataset": "d", "microbatch_size": 1, "learning_rate": 1.0, "checkpoint_interval": 1}
    return TrainConfig.model_validate(needed | keys)


def trained(folder: Path, weights: Arrays, header: WeightsHeader, tokenizer: bool = True) -> Path:
    """Write a checkpoint with the files that an export reads."""
    checkpoint = folder / "checkpoints" / "20260101Z000000-step-000001"
    checkpoint.mkdir(parents=True)
    write_weights(checkpoint, weights, header, ONE_FILE)
    if tokenizer:
        train_bpe(["to be or not to be"], 270).save(checkpoint / "tokenizer.json")
    return checkpoint


def from_scratch(folder: Path, **keys: Any) -> tuple[Path, Arrays]:
    """Write a checkpoint of a small model with random weights; return it and the weights."""
    model = ModelConfig.model_validate(SMALL | keys)
    rng = np.random.default_rng(0)
    shapes = {name: parameter.shape for name, parameter in model_parameters(model).items()}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return trained(folder, arrays, WeightsHeader(model, train_settings(), "none")), arrays


def imported_weights(run: RunFolder, **settings: Any) -> tuple[Arrays, WeightsHeader]:
    """Return the weights of an imported model in float32, and the header of a run from them."""
    start = Weights(run.imported / "model.safetensors")
    header = start.header._replace(train=train_settings(start_from="imported", **settings))
    return {name: start.array(name).astype(np.float32) for name in start.names()}, header


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


# Import, then export


@pytest.mark.parametrize("name", NAMES)
def test_import_then_export_gives_the_same_tensors(name: str, tmp_path: Path) -> None:
    run = imported(name, tmp_path / "run")
    exported(run.path, tmp_path / "out")
    wanted = arrays(MODELS / name)
    if name == "gemma3-vision":
        text = {n for n in wanted if n.startswith("language_model.")}
        wanted = {n.removeprefix("language_model."): wanted[n] for n in text}
        assert config_of(tmp_path / "out")["model_type"] == "gemma3_text"
        assert config_of(tmp_path / "out")["architectures"] == ["Gemma3ForCausalLM"]
    else:
        for file in ("config.json", "generation_config.json"):
            same = MODELS / name / file
            assert (tmp_path / "out" / file).read_bytes() == same.read_bytes()
    assert_same(arrays(tmp_path / "out"), wanted)


def test_mixed_dtypes_are_kept(tmp_path: Path) -> None:
    tensors = arrays(MODELS / "gpt2")
    for name in tensors:
        kind = np.float32 if ".ln_" in name else np.float16
        tensors[name] = tensors[name].astype(kind)
    run = imported("gpt2", tmp_path / "run", copy("gpt2", tmp_path / "source", tensors))
    exported(run.path, tmp_path / "out")
    assert_same(arrays(tmp_path / "out"), tensors)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_fine_tuned_weights_are_written_in_their_published_dtype(
    is_sharded: bool, tmp_path: Path
) -> None:
    run = imported("llama-sharded", tmp_path / "run")
    masters, header = imported_weights(run)
    checkpoint = trained(run.path, masters, header)
    if is_sharded:
        (checkpoint / "model.safetensors").unlink()
        write_weights(checkpoint, masters, header, 20_000)
        assert len(list(checkpoint.glob("model-*.safetensors"))) > 2
    assert exported(checkpoint / "model.safetensors", tmp_path / "out") == []
    assert_same(arrays(tmp_path / "out"), arrays(MODELS / "llama-sharded"))
    assert config_of(tmp_path / "out") == config_of(MODELS / "llama-sharded")
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()


def test_a_run_elsewhere_finds_the_published_files_of_its_start(tmp_path: Path) -> None:
    run = imported("llama-sharded", tmp_path / "run")
    masters, header = imported_weights(run)
    elsewhere = header._replace(train=train_settings(start_from=str(run.path)))
    other = trained(tmp_path / "other", masters, elsewhere)
    assert published_folder(Weights(other / "model.safetensors")) == run.imported


CHAT_TEMPLATE = "{{ messages[0].content }}"


def imported_chat_model(folder: Path) -> RunFolder:
    """Import a model with a tokenizer, a chat template and a generation config."""
    source = copy("gpt2", folder / "source")
    train_bpe(["to be or not to be"], 270).save(source / "tokenizer.json")
    (source / "generation_config.json").write_text('{"top_k": 7}')
    (source / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return imported("", folder / "run", source)


def fine_tuned(run: RunFolder, start: Path, tokenizer: Path | None = None) -> Path:
    """Save a checkpoint of a run that continues from the weights in a folder, and return it.

    Args:
        tokenizer: of the dataset.
    """
    weights = Weights(start / "model.safetensors")
    config = RunConfig(weights.header.model, train_settings(start_from="imported"))
    state = create_model_and_optimizer(config, 10, one_device())
    with Saver(run.checkpoints, config, tokenizer, lambda: None, (), weights) as saver:
        saver.save(*state, checkpoint_meta(config, step=len(list_checkpoints(run.checkpoints))))
    return list_checkpoints(run.checkpoints)[-1].folder


def test_checkpoints_keep_the_files_that_a_model_was_published_with(tmp_path: Path) -> None:
    run = imported_chat_model(tmp_path)
    first = fine_tuned(run, run.imported)
    shutil.rmtree(run.imported)
    resumed = fine_tuned(run, first)
    alone = Path(shutil.copytree(resumed, tmp_path / "alone"))
    assert exported(alone, tmp_path / "out") == []
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"top_k": 7}'
    assert config_of(tmp_path / "out") == config_of(tmp_path / "source")
    (alone / "published" / "chat_template.jinja").write_text("another one")
    with pytest.raises(UserError, match=r"damaged \(published/chat_template\.jinja\)"):
        exported(alone, tmp_path / "again")


def test_an_export_without_the_published_files_says_so(tmp_path: Path) -> None:
    run = imported_chat_model(tmp_path)
    checkpoint = trained(run.path, *imported_weights(run))  # without a copy of those files
    shutil.rmtree(run.imported)
    [note] = exported(checkpoint, tmp_path / "out")
    assert note.startswith("written without the chat template, generation config")
    assert "import source again" in note


def test_a_longer_context_only_changes_the_config(tmp_path: Path) -> None:
    run = imported("llama-sharded", tmp_path / "run")
    weights, header = imported_weights(run)
    longer = header.model.model_copy(update={"context_length": 200})
    exported(trained(run.path, weights, header._replace(model=longer)), tmp_path / "out")
    found, before = config_of(tmp_path / "out"), config_of(MODELS / "llama-sharded")
    assert found["max_position_embeddings"] == 200
    assert found["eos_token_id"] == before["eos_token_id"]
    assert found["torch_dtype"] == "bfloat16"


def test_values_that_overflow_the_published_dtype_are_refused(tmp_path: Path) -> None:
    tensors = {name: a.astype(np.float16) for name, a in arrays(MODELS / "gpt2").items()}
    run = imported("gpt2", tmp_path / "run", copy("gpt2", tmp_path / "source", tensors))
    masters, header = imported_weights(run)
    masters["final_norm.scale"][0] = 1e6
    checkpoint = trained(run.path, masters, header)
    with pytest.raises(UserError, match=r"final_norm.scale: has values that overflow float16"):
        exported(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_large_models_are_written_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "MAX_SHARD_BYTES", 40_000)
    run = imported("mixtral", tmp_path / "run")
    exported(run.path, tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, 5)]
    assert all(path.stat().st_size < 50_000 for path in (tmp_path / "out").glob("*.safetensors"))
    wanted = arrays(MODELS / "mixtral")
    assert_same(arrays(tmp_path / "out"), wanted)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in wanted.values())
    assert_same(
        arrays(imported("", tmp_path / "again", tmp_path / "out").imported), arrays(run.imported)
    )


@pytest.mark.parametrize("is_old", [True, False])
def test_an_export_stops_where_the_answers_of_training_ended(is_old: bool, tmp_path: Path) -> None:
    """An older dataset lacks the tokenizer_config.json of the tokenizer it was made with."""
    run = imported_chat_model(tmp_path)
    tokenizer = load_tokenizer(run.imported)
    name = tokenizer.decode([5])
    (run.imported / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
    (run.imported / "generation_config.json").write_text('{"eos_token_id": 5, "top_k": 7}')
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    if is_old:
        tokenizer.save(dataset / "tokenizer.json")
    else:
        save_tokenizer(load_tokenizer(run.imported), dataset)
    checkpoint = fine_tuned(run, run.imported, dataset / "tokenizer.json")
    loaded = load.load_tokenizer(checkpoint)
    assert loaded.end_of_answer == (0 if is_old else 5)
    weights = Weights(checkpoint / "model.safetensors")
    assert all_stop_tokens(weights, loaded) == ((5, 0) if is_old else (5,))
    exported(checkpoint, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [5, 0] if is_old else 5, "top_k": 7}
    assert describe_ends(tmp_path / "out").startswith(f"{name} (5)")


def test_a_checkpoint_of_a_published_model_means_what_that_does(tmp_path: Path) -> None:
    """Its config.json, which isn't beside the checkpoint's tokenizer, may be all that says so."""
    run = imported_chat_model(tmp_path)
    config = config_of(run.imported)
    (run.imported / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    (run.imported / "chat_template.jinja").unlink()
    checkpoint = fine_tuned(run, run.imported)
    assert load.load_tokenizer(checkpoint).end_of_answer == 5
    assert all_stop_tokens(
        Weights(checkpoint / "model.safetensors"), load_tokenizer(checkpoint)
    ) == (5,)


# The family of a model trained in Rungs


@pytest.mark.parametrize(
    ("keys", "family", "biases"),
    [
        (SMALL, "gpt2", ("qkv_bias",)),
        (SMALL | {"qkv_bias": True, "tied_embeddings": True}, "gpt2", ()),
        (SMALL | {"n_layers": 0, "n_heads": None}, "gpt2", ()),
        (SMALL | {"feed_forward": "gelu", "ffn_dim": 12}, "gpt2", ("qkv_bias",)),
        (SMALL | {"feed_forward": "relu_squared"}, "gpt2", ("qkv_bias",)),
        (LLAMA | {"zero_init_residual": True}, "llama", ()),
        (LLAMA, "llama", ()),
        (LLAMA | {"feed_forward": "geglu_tanh", "n_kv_heads": 1, "head_dim": 6}, "llama", ()),
        (LLAMA | {"attention_output_bias": True, "ffn_bias": True}, "llama", ("qkv_bias",)),
        (LLAMA | {"qkv_bias": True}, "llama", ("attention_output_bias",)),
        (LLAMA | {"sliding_window": 4}, "mistral", ()),
        (LLAMA | {"n_experts": 4, "experts_per_token": 2}, "mixtral", ()),
        (LLAMA | {"qkv_bias": True} | WINDOW, "qwen2", ()),
        (LLAMA | {"qk_norm": True}, "qwen3", ()),
        (LLAMA | {"qk_norm": True} | WINDOW, "qwen3", ()),
        (LLAMA | MOE, "qwen3_moe", ()),
        (LLAMA | MOE | {"sliding_window": 4}, "qwen3_moe", ()),
        (LLAMA | OLMO, "olmo2", ()),
        (LLAMA | OLMO | WINDOW | {"sliding_rope_theta": 5.0}, "olmo3", ()),
        (LLAMA | {"layer_pattern": ["nope", "global"]}, "smollm3", ()),
        (GEMMA, "gemma", ()),
        (GEMMA | {"norm_placement": "around", "final_soft_cap": 9.0}, "gemma2", ()),
        (GEMMA | AROUND | WINDOW | {"sliding_rope_theta": 5.0}, "gemma3_text", ()),
    ],
)
def test_chosen_family(keys: dict[str, Any], family: str, biases: tuple[str, ...]) -> None:
    choice = choose_family(ModelConfig.model_validate(keys))
    assert (choice.family.model_type, choice.added_biases) == (family, biases)


def test_the_family_that_a_model_was_imported_as_comes_first() -> None:
    assert choose_family(ModelConfig.model_validate(LLAMA), "mistral").family is FAMILIES["mistral"]
    gemma3 = ModelConfig.model_validate(GEMMA | AROUND)
    assert choose_family(gemma3, "gemma3").family is FAMILIES[VISION_MODELS["gemma3"]]


@pytest.mark.parametrize(
    ("keys", "lacks"),
    [
        (SMALL | {"residual": False}, "the closest, gpt2, has no residual false"),
        (SMALL | {"positions": "sinusoidal"}, 'gpt2, has no positions "sinusoidal"'),
        (LLAMA | {"feed_forward": "gelu"}, 'llama, has no feed_forward "gelu"'),
        (LLAMA | {"feed_forward": "relu_squared"}, 'llama, has no feed_forward "relu_squared"'),
        (LLAMA | {"query_pre_attn_scalar": 3.0}, "llama, has no query_pre_attn_scalar 3"),
        (LLAMA | OLMO | {"qk_norm_scope": "head"}, 'has no norm_placement "output"'),
        (LLAMA | {"qk_norm": True, "layer_pattern": ["nope"]}, "has no "),
        (LLAMA | WINDOW | {"layer_pattern": ["nope", "sliding"]}, "has no "),
        (LLAMA | WINDOW | {"sliding_rope_theta": 7.0}, "has no sliding_rope_theta 7"),
        (GEMMA | {"norm_placement": "around", "query_pre_attn_scalar": 2.5}, "query_pre_attn_s"),
        (SMALL | {"norm_parameters": False}, "the closest, gpt2, has no norm_parameters false"),
        (LLAMA | {"embedding_norm": True}, "llama, has no embedding_norm true"),
        (LLAMA | {"residual_scalars": True}, "llama, has no residual_scalars true"),
        (LLAMA | {"value_embedding_every": 2}, "llama, has no value_embedding_every 2"),
        (SMALL | {"mup": {"base_emb_dim": 4}}, "the closest, gpt2, has no mup {"),
        (LLAMA | {"mup": {"base_emb_dim": 4, "base_head_dim": 2}}, "llama, has no mup {"),
    ],
)
def test_models_that_no_family_can_express(keys: dict[str, Any], lacks: str) -> None:
    with pytest.raises(UserError, match=lacks) as caught:
        choose_family(ModelConfig.model_validate(keys))
    assert f"families: {', '.join(sorted(FAMILIES))}" in str(caught.value)


def test_added_biases_are_zero(tmp_path: Path) -> None:
    checkpoint, weights = from_scratch(tmp_path / "run")
    assert "adds biases of 0 that the family has (qkv_bias)" in Export(str(checkpoint)).summary()
    exported(checkpoint, tmp_path / "out")
    found = arrays(tmp_path / "out")
    np.testing.assert_array_equal(found["transformer.h.1.attn.c_attn.bias"], np.zeros(24))
    query = found["transformer.h.1.attn.c_attn.weight"][:, :8].reshape(8, 2, 4)
    np.testing.assert_array_equal(query, weights["blocks.attention.query.kernel"][1])
    np.testing.assert_array_equal(found["lm_head.weight"], weights["head.kernel"].T)


def test_config_and_tokenizer_files_of_a_trained_model(tmp_path: Path) -> None:
    checkpoint, _ = from_scratch(tmp_path / "run", **LLAMA)
    assert exported(checkpoint, tmp_path / "out") == []
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["eos_token"] == "<|endoftext|>"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert config_of(tmp_path / "out")["eos_token_id"] == generation["eos_token_id"] == 0
    assert config_of(tmp_path / "out")["torch_dtype"] == "float32"


def test_notes_on_the_tokenizer(tmp_path: Path) -> None:
    checkpoint, _ = from_scratch(tmp_path / "run", **LLAMA, qkv_bias=True, **WINDOW)
    assert "AutoTokenizer splits texts as Qwen 2 does" in exported(checkpoint, tmp_path / "out")[0]
    run = imported("gpt2", tmp_path / "imported")
    notes = exported(run.path, tmp_path / "other")
    assert notes == ["written without a tokenizer: it was imported without"]


def test_an_imported_tokenizer_is_kept_unless_training_used_another(tmp_path: Path) -> None:
    source = copy("gpt2", tmp_path / "source")
    train_bpe(["to be or not to be"], 270).save(source / "tokenizer.json")
    (source / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    run = imported("gpt2", tmp_path / "run", source)
    exported(run.path, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    masters, header = imported_weights(run)
    checkpoint = trained(run.path, masters, header, tokenizer=False)
    train_bpe(["quite another text"], 280).save(checkpoint / "tokenizer.json")
    exported(checkpoint, tmp_path / "other")
    described = json.loads((tmp_path / "other" / "tokenizer_config.json").read_text())
    assert described["model_max_length"] == 96
    (checkpoint / "tokenizer.json").unlink()
    header = header._replace(tokenizer="./nowhere")
    write_weights(checkpoint, masters, header, ONE_FILE)
    [note] = exported(checkpoint, tmp_path / "third")
    assert note.startswith("written with the imported tokenizer, since there is no other")
    assert json.loads((tmp_path / "third/tokenizer_config.json").read_text()) == {
        "model_max_length": 7
    }


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    checkpoint, weights = from_scratch(tmp_path / "run")
    header = Weights(checkpoint / "model.safetensors").header
    del weights["final_norm.scale"]
    write_weights(checkpoint, weights, header, ONE_FILE)
    with pytest.raises(UserError, match=r"tensor final_norm.scale: missing"):
        Export(str(checkpoint))


def test_lora_weights_are_merged(tmp_path: Path) -> None:
    run = imported("gpt2", tmp_path / "run")
    lora = {"rank": 2, "alpha": 4, "targets": ["output"]}
    weights, header = imported_weights(run, lora=lora)
    rng = np.random.default_rng(0)
    beside, kernel = "blocks.attention.output.low_rank.", "blocks.attention.output.kernel"
    layers, heads, width, emb = weights[kernel].shape
    down = rng.normal(size=(layers, heads, width, 2)).astype(np.float32)
    up = rng.normal(size=(layers, 2, emb)).astype(np.float32)
    weights |= {beside + "down": down, beside + "up": up}
    exported(trained(run.path, weights, header), tmp_path / "out")
    found, before = arrays(tmp_path / "out"), arrays(MODELS / "gpt2")
    name = "transformer.h.1.attn.c_proj.weight"
    wanted = before[name] + 2 * down[1].reshape(-1, 2) @ up[1]
    np.testing.assert_allclose(found.pop(name), wanted, rtol=1e-5, atol=1e-6)
    for layer in (0, 2):
        found.pop(name.replace("1", str(layer)))
    assert_same(found, {name: before[name] for name in found})
