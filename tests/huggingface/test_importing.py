"""Importing: hidden states, errors, and the files that are written."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors import safe_open
from tokenizers import models

from rungs.checkpointing.load import load_model, load_tokenizer
from rungs.checkpointing.weights_file import Weights
from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.config import reference, run_config
from rungs.config.model_config import ModelConfig
from rungs.data.text.tokenizer import train_bpe
from rungs.huggingface.exporting import Export
from rungs.huggingface.importing import Import, find_source, import_model, target_folder
from rungs.model.gpt import GPT
from rungs.parallel.sharding import dotted
from rungs.run.folder import RunFolder
from tests.support.published_models import MODELS, Arrays, arrays, copy, expected
from tests.support.tiny_model import bind_and_jit


def imported(folder: Path, target: Path) -> RunFolder:
    import_model(Import.from_source(find_source(str(folder))), target)
    return RunFolder(target)


def message(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        Import.from_source(find_source(str(folder)))
    return str(caught.value)


DIFFERENT = ["gpt2", "llama", "gemma3", "mixtral", "gemma2", "olmo3", "qwen2", "smollm3"]
DIFFERENT += ["deepseek-v2", "deepseek-v3", "gpt-oss", "qwen3-next", "qwen3-5", "olmo-hybrid"]
"""Families whose layers differ."""


@pytest.mark.parametrize("name", DIFFERENT)
def test_hidden_states_match_transformers(name: str, tmp_path: Path) -> None:
    """transformers computed the committed values in float32. They have a magnitude of about 1, and
    differ from ours by rounding only: 2e-5 at most."""
    run = imported(MODELS / name, tmp_path / "run")
    recorded = expected(name)
    forward = bind_and_jit(
        lambda model, tokens_BS: model.forward(tokens_BS, keep_hidden_states=True),
        load_model(run.path),
    )
    found = forward(jnp.asarray(recorded["tokens"]))
    assert found.hidden_states is not None
    for states, wanted in zip(found.hidden_states, recorded["hidden_states"], strict=True):
        np.testing.assert_allclose(states, wanted, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found.logits_BSV, recorded["logits"], rtol=0, atol=1e-4)


GRADIENTS = sorted(path.parent.name for path in MODELS.glob("*/gradients.safetensors"))
SENSITIVE = {"qwen3-next": 1e-4, "qwen3-5": 1e-4, "olmo-hybrid": 3e-4}
"""Other limits, about three times what one change of all weights by float32's rounding, 6e-8, does:
at most 3e-5, 3e-5 and 1e-4 of the largest gradient in six draws, and 8e-6 for DeepSeek-V3."""


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_match_transformers(name: str, tmp_path: Path) -> None:
    """Of the mean cross-entropy; gradients are read as if they were weights."""
    tokens_BS = expected(name)["tokens"]

    def loss(model: GPT, inputs_BS: jax.Array, targets_BS: jax.Array) -> jax.Array:
        return model.summed_loss(inputs_BS, targets_BS)[0] / targets_BS.size

    model = load_model(imported(MODELS / name, tmp_path / "run").path)
    gradient = bind_and_jit(nnx.grad(loss), model)(tokens_BS[:, :-1], tokens_BS[:, 1:])
    with safe_open(MODELS / name / "gradients.safetensors", framework="numpy") as file:
        wanted = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    run = imported(copy(name, tmp_path / "source", wanted), tmp_path / "gradients")
    weights = Weights(run.imported / "model.safetensors")
    for path, found in nnx.to_flat_state(gradient):
        other = weights.array(dotted(path))
        limit = SENSITIVE.get(name, 2e-5) * max(np.abs(other).max(), 0.01)
        np.testing.assert_allclose(found.get_value(), other, rtol=0, atol=limit, err_msg=str(path))


def test_run_folder_contents(tmp_path: Path) -> None:
    run = imported(MODELS / "llama-sharded", tmp_path / "run")
    text = strict_json.read_text(run.path / "model.json")
    model = strict_json.parse(text, run.path / "model.json", ModelConfig)
    header = Weights(run.imported / "model.safetensors").header
    assert run_config.differences(model, header.model) == {}
    assert header.train is None
    assert header.origin is not None
    assert header.origin.source == "llama-sharded"
    assert header.origin.dtype == "bfloat16"
    assert header.origin.other_dtypes == {}
    found = {path.relative_to(run.path).as_posix() for path in run.path.rglob("*")}
    assert found == {
        "model.json",
        "checkpoints",
        "checkpoints/imported",
        *(f"checkpoints/imported/{name}" for name in ("config.json", "generation_config.json")),
        "checkpoints/imported/model.safetensors",
        "checkpoints/imported/SHA256SUMS",
    }
    kept = (run.imported / "config.json").read_bytes()
    assert kept == (MODELS / "llama-sharded" / "config.json").read_bytes()


def test_tensors_keep_their_dtypes(tmp_path: Path) -> None:
    tensors = arrays(MODELS / "llama")
    for name in tensors:
        kind = np.float32 if "norm" in name else ml_dtypes.bfloat16
        tensors[name] = tensors[name].astype(kind)
    run = imported(copy("llama", tmp_path / "source", tensors), tmp_path / "run")
    weights = Weights(run.imported / "model.safetensors")
    assert weights.array("blocks.attention.query.kernel").dtype == ml_dtypes.bfloat16
    assert weights.array("final_norm.scale").dtype == np.float32
    origin = weights.header.origin
    assert origin is not None
    assert origin.dtype == "bfloat16"
    assert set(origin.other_dtypes) == {name for name in weights.names() if "norm" in name}


# Tensors that are left out or renamed


def test_masks_are_left_out_and_a_missing_prefix_is_added(tmp_path: Path) -> None:
    plain = {name.removeprefix("transformer."): a for name, a in arrays(MODELS / "gpt2").items()}
    masks: Arrays = {f"h.{layer}.attn.bias": np.ones((1, 1, 4, 4), np.uint8) for layer in range(3)}
    masks |= {"h.0.attn.masked_bias": np.asarray([-1e4], np.float32)}
    found = Import.from_source(find_source(str(copy("gpt2", tmp_path / "source", plain | masks))))
    assert found.match.notes == [
        "left out: 4 tensors (causal masks, which Rungs computes)",
        "added the prefix transformer. to the names of all tensors",
    ]
    import_model(found, tmp_path / "run")
    plain_run = imported(MODELS / "gpt2", tmp_path / "plain")
    one = Weights(tmp_path / "run/checkpoints/imported/model.safetensors")
    other = Weights(plain_run.imported / "model.safetensors")
    for name in other.names():
        np.testing.assert_array_equal(one.array(name), other.array(name))


def test_rotary_frequencies_and_vision_towers_are_left_out(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = arrays(MODELS / "llama") | {name: np.ones(4, np.float32)}
    source = find_source(str(copy("llama", tmp_path / "source", tensors)))
    assert Import.from_source(source).match.notes == [
        "left out: 1 tensor (rotary frequencies, which Rungs computes)"
    ]
    notes = Import.from_source(find_source(str(MODELS / "gemma3-vision"))).match.notes
    assert notes == ["left out: 23 tensors (the vision tower and its projector)"]


def test_vision_models_with_tensor_names_of_transformers_5(tmp_path: Path) -> None:
    def renamed(name: str) -> str:
        if name.startswith("language_model.model."):
            return name.replace("language_model.model.", "model.language_model.")
        return "model." + name

    tensors = {renamed(name): a for name, a in arrays(MODELS / "gemma3-vision").items()}
    source = find_source(str(copy("gemma3-vision", tmp_path / "source", tensors)))
    before = Import.from_source(find_source(str(MODELS / "gemma3-vision")))
    assert Import.from_source(source).match.names.keys() == before.match.names.keys()


def test_a_copy_of_the_embedding_as_head_is_left_out(tmp_path: Path) -> None:
    tensors = arrays(MODELS / "qwen2")
    embedding = tensors["model.embed_tokens.weight"]
    same = copy("qwen2", tmp_path / "same", tensors | {"lm_head.weight": embedding})
    assert Import.from_source(find_source(str(same))).match.notes == [
        "left out: lm_head.weight (a copy of the embedding it is tied to)"
    ]
    other = copy("qwen2", tmp_path / "other", tensors | {"lm_head.weight": embedding + 1})
    assert "tensor lm_head.weight: differs from model.embed_tokens.weight" in message(other)


def test_pytorch_files_are_refused_with_how_to_convert_them(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path / "source", {})
    (folder / "model.safetensors").unlink()
    assert "has no weights; needs model.safetensors" in message(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    convert = f"AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained("
    assert convert in message(folder)


# Wrong tensors


def test_wrong_tensors_are_named_each_in_its_line(tmp_path: Path) -> None:
    tensors = arrays(MODELS / "llama")
    gone, wrong = "model.layers.1.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"
    mixed = "model.layers.1.mlp.down_proj.weight"
    del tensors[gone]
    tensors[wrong] = tensors[wrong][:-1]
    tensors[mixed] = tensors[mixed].astype(np.float16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    tensors["model.layers.0.extra.weight"] = np.zeros(1, np.float32)
    text = message(copy("llama", tmp_path / "source", tensors))
    assert f"tensor {gone}: missing" in text
    assert f"tensor {wrong}: has shape (23,), must have (24,)" in text
    assert f"tensor {mixed}: is float16, but model.layers.0.mlp.down_proj.weight is flo" in text
    assert "tensor model.norm.weight: has dtype I8; supported are float32, float16, bfl" in text
    assert "tensor model.layers.0.extra.weight: unknown" in text
    assert len(text.splitlines()) == 5
    many = {f"model.odd.{number}": np.zeros(1, np.float32) for number in range(30)}
    lines = message(copy("llama", tmp_path / "many", many)).splitlines()
    assert len(lines) == 21
    assert lines[-1].endswith("more")


def test_missing_and_damaged_shards_are_named(tmp_path: Path) -> None:
    folder = copy("llama-sharded", tmp_path / "source")
    shard = sorted(folder.glob("model-*"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard}: not a complete safetensors file" in message(folder)
    shard.unlink()
    assert f"{shard}: no such file; the download or copy is incomplete" in message(folder)
    folder = copy("llama-sharded", tmp_path / "other")
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"]["model.odd"] = next(iter(names["weight_map"].values()))
    index.write_text(json.dumps(names))
    assert "tensor model.odd: missing" in message(folder)
    index.write_text("{}")
    assert f"{index}: damaged" in message(folder)


def test_a_missing_or_unreadable_config_is_reported(tmp_path: Path) -> None:
    assert "config.json: no such file" in message(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert "must hold a JSON object" in message(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "unreadable JSON" in message(tmp_path)


# The disk


def test_an_existing_folder_is_never_replaced(tmp_path: Path) -> None:
    assert target_folder("never-made") == Path("runs/never-made")
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="exists already; choose another name"):
        target_folder(str(tmp_path / "run"))


def test_model_json_names_its_schema_within_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the key is left out."""
    run = imported(MODELS / "gpt2", tmp_path / "run")
    assert "$schema" not in json.loads((run.path / "model.json").read_text())
    monkeypatch.setattr(reference, "checkout", lambda: tmp_path)
    run = imported(MODELS / "gpt2", tmp_path / "runs" / "name")
    keys = json.loads((run.path / "model.json").read_text())
    assert keys["$schema"] == "../../schemas/model.schema.json"


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs sha256sum")
def test_imported_files_have_the_checksums_that_sha256sum_computes(tmp_path: Path) -> None:
    run = imported(MODELS / "gpt2", tmp_path / "run")
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert subprocess.run(command, cwd=run.imported, check=False).returncode == 0
    names = {line.split("  ")[1] for line in (run.imported / "SHA256SUMS").read_text().splitlines()}
    assert names == {path.name for path in run.imported.iterdir()} - {"SHA256SUMS"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_imported_files_that_have_changed_are_refused(name: str, tmp_path: Path) -> None:
    run = imported(MODELS / "gpt2", tmp_path / "run")
    with (run.imported / name).open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"~")
    for read in (load_model, Export):
        with pytest.raises(UserError, match=rf"imported: damaged \({name}\); import it again"):
            read(str(run.path))
    (run.imported / "SHA256SUMS").unlink()
    load_model(run.path)


# Links


@pytest.mark.parametrize("name", ["chat_template.jinja", "config.json", "model.safetensors"])
def test_links_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    """In a run folder, too, whose files export gives away."""
    source, run = copy("llama", tmp_path / "source"), imported(MODELS / "llama", tmp_path / "run")
    secret = tmp_path / "secret"
    shutil.copy(source / name, secret) if (source / name).exists() else secret.write_text("secret")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    with pytest.raises(UserError, match=f"{name}: is a link out of its folder, to {secret}"):
        imported(source, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    if name != "model.safetensors":
        (run.imported / "SHA256SUMS").unlink()
        (run.imported / name).unlink(missing_ok=True)
        (run.imported / name).symlink_to(secret)
        with pytest.raises(UserError, match=f"{name}: is a link out of its folder"):
            Export(str(run.path))


def test_links_within_the_folder_and_into_the_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    cached = copy("llama", tmp_path / "models--a--b" / "snapshots" / "1234")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for path in list(cached.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    imported(cached, tmp_path / "run")
    plain = copy("llama", tmp_path / "plain")
    (plain / "config.json").rename(plain / "kept.json")
    (plain / "config.json").symlink_to("kept.json")
    imported(plain, tmp_path / "other")


# Tokenizers


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    source = copy("llama", tmp_path / "source")
    train_bpe(["to be or not to be"], 270).save(source / "tokenizer.json")
    (source / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (source / "training_args.bin").write_bytes(b"not wanted")
    run = imported(source, tmp_path / "run")
    names = {path.name for path in run.imported.iterdir()}
    kept = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == kept | {"SHA256SUMS"}
    assert load_tokenizer(run.path).encode("to be") == load_tokenizer(run.path).encode("to be")


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("tokenizer.json", "[]", "not a tokenizer file: "),
        ("tokenizer.json", '{"version": "1.0", "trunc', "not a tokenizer file: "),
        ("tokenizer.json", "\0", "not a tokenizer file: "),
        ("generation_config.json", "[[", "not readable as JSON"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id: must be a token id"),
        ("generation_config.json", '{"eos_token_id": [[1]]}', "eos_token_id: must be a token id"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id: must be a token id"),
    ],
)
def test_the_message_on_a_damaged_file_names_the_one_that_was_given(
    file: str, text: str, wrong: str, tmp_path: Path
) -> None:
    source = copy("llama", tmp_path / "source")
    (source / file).write_text(text)
    with pytest.raises(UserError) as raised:
        imported(source, tmp_path / "run")
    assert str(raised.value).startswith(f"{source / file}: {wrong}")
    assert list(tmp_path.iterdir()) == [source]


def test_a_token_beyond_the_vocabulary_that_would_end_texts_is_reported(tmp_path: Path) -> None:
    source = copy("llama", tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 1000000]}')
    notes = import_model(Import.from_source(find_source(str(source))), tmp_path / "run")
    assert [note for note in notes if "eos_token_id" in note] == [
        "warning: eos_token_id 1000000 is beyond the model's vocabulary, and ends no text"
    ]


def test_a_text_config_where_none_belongs_is_named(tmp_path: Path) -> None:
    source = copy("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"text_config": config}))
    assert "config.json: text_config: a llama has none; of models with" in message(source)


@pytest.mark.parametrize(("added", "warns"), [([], False), (["<pad>"], True)])
def test_a_tokenizer_with_more_tokens_than_the_model_is_reported(
    added: list[str], warns: bool, tmp_path: Path
) -> None:
    """Fewer are common: published models pad their vocabulary."""
    source = copy("llama", tmp_path / "source")
    words = {
        f"w{i}": i for i in range(Import.from_source(find_source(str(source))).model.vocab_size)
    }
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(source / "tokenizer.json"))
    notes = import_model(Import.from_source(find_source(str(source))), tmp_path / "run")
    wanted = (
        "warning: the tokenizer has ids up to 67 ('<pad>'), but the model only 67 tokens; prompts"
        " and datasets with an id from 67 are refused"
    )
    assert notes == [wanted] * warns


def test_vocab_and_merges_are_converted_to_tokenizer_json(tmp_path: Path) -> None:
    source = copy("llama", tmp_path / "source")
    tokenizer = train_bpe(["to be or not to be"], 270)
    tokenizer.save(tmp_path / "tokenizer.json")
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (source / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (source / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    run = imported(source, tmp_path / "run")
    assert (run.imported / "vocab.json").is_file()
    assert load_tokenizer(run.path).encode("to be") == tokenizer.encode("to be")
