"""GGUF files: what an export holds comes back, and damaged or foreign files are refused."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from rungs.checkpointing.weights_file import Weights, WeightsHeader
from rungs.cli import pretrained
from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig
from rungs.data.text.chat_template import ChatTemplate
from rungs.data.text.tokenizer_files import load_tokenizer, save_tokenizer
from rungs.huggingface.exporting import Export
from rungs.huggingface.families.family import normal_form
from rungs.huggingface.gguf.reading import GGUFTensors
from rungs.huggingface.gguf.writing import DTYPES, GGUFExport
from rungs.huggingface.importing import Import, find_source, import_model
from rungs.huggingface.tensors import model_parameters
from tests.huggingface.test_exporting import (
    GEMMA,
    LLAMA,
    MOE,
    OLMO,
    from_scratch,
    train_settings,
    trained,
)
from tests.support.published_models import MODELS, arrays, copy

TOKENIZERS = Path(__file__).parents[1] / "fixtures/tokenizers"
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
YARN = {"rope_type": "yarn", "rope_theta": 60.0, "factor": 3.0} | {
    "original_max_position_embeddings": 40
}
KNOWN_TOKENIZERS = ("gpt2", "llama3", "olmo2", "qwen", "gemma", "mistral")
EXPRESSIBLE: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 6},
    "gemma3": {"query_pre_attn_scalar": 6},
    "gpt2": {},
    "gpt2-untied": {"activation_function": "gelu_new"},
    "llama": {},
    "llama-linear-scaling": {},
    "llama-sharded": {},
    "llama-tied-llama3-scaling": {},
    "mistral": {"sliding_window": None},
    "mixtral": {},
    "olmo2": {"attention_bias": False},
    "olmo3": {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 60}}},
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": {},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0, 1]},
}
"""Models that llama.cpp can run, with the keys changed that it lacks."""


def imported(source: Path, target: Path) -> Path:
    import_model(Import.from_source(find_source(str(source))), target)
    return target


def imported_fixture(name: str, place: Path) -> Path:
    keys, tensors = EXPRESSIBLE[name], None
    if "attention_bias" in keys:
        tensors = {n: array for n, array in arrays(MODELS / name).items() if "bias" not in n}
    return imported(copy(name, place / "source", tensors, **keys), place / "run")


def exported(run: Path, file: Path, dtype: str) -> Path:
    GGUFExport(Export(str(run)), dtype).write(file, file.stem)
    return file


def weights_of(run: Path) -> Weights:
    return Weights(run / "checkpoints/imported/model.safetensors")


def with_tokenizer(name: str, place: Path, chat_template: str | None = None) -> Path:
    """Write a checkpoint of a small Llama with one of the tokenizers. OLMo 2's splits texts as
    Llama 3's, written in another way, and merges also words that are tokens."""
    folder = TOKENIZERS / name.replace("olmo2", "llama3")
    size = load_tokenizer(folder).vocab_size
    model = ModelConfig.model_validate(LLAMA | {"vocab_size": size, "emb_dim": 32})
    rng = np.random.default_rng(0)
    shapes = {name: each.shape for name, each in model_parameters(model).items()}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    header = WeightsHeader(model, train_settings(), "none")
    checkpoint = trained(place / "made", weights, header, tokenizer=False)
    shutil.copytree(folder, checkpoint, dirs_exist_ok=True)
    save_tokenizer(load_tokenizer(folder), checkpoint)
    if name == "olmo2":
        content = json.loads((checkpoint / "tokenizer.json").read_text())
        content["model"]["ignore_merges"] = False
        content["pre_tokenizer"]["pretokenizers"][0] |= {"behavior": "Removed", "invert": True}
        (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    if chat_template:
        ChatTemplate(chat_template, {}).save(checkpoint)
    return checkpoint


# Round trips


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_export_then_import_gives_the_same_weights(name: str, tmp_path: Path) -> None:
    run = imported_fixture(name, tmp_path)
    back = imported(exported(run, tmp_path / "model.gguf", "f32"), tmp_path / "back")
    before, after = weights_of(run), weights_of(back)
    assert normal_form(after.header.model) == normal_form(before.header.model)
    assert before.names() == after.names()
    for each in sorted(before.names()):
        ours, theirs = before.array(each).astype(np.float32), after.array(each)
        if name.startswith("gemma") and each.endswith("scale"):  # 1 was added
            assert np.abs(ours - theirs).max() < 2e-7
        else:
            assert ours.tobytes() == theirs.tobytes(), each


def test_a_file_has_the_name_that_it_was_given(tmp_path: Path) -> None:
    run = imported_fixture("llama", tmp_path)
    pretrained.export_gguf(str(run), tmp_path / "my-llama.gguf", "f16")
    name = gguf.GGUFReader(tmp_path / "my-llama.gguf").fields["general.name"]
    assert name.contents() == "my-llama"


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_values_of_16_bits_come_back(dtype: str, tmp_path: Path) -> None:
    kind = DTYPES[dtype][0]
    rounded = {
        name: dequantize(quantize(tensor.astype(np.float32), kind), kind)
        for name, tensor in arrays(MODELS / "llama").items()
    }
    run = imported(copy("llama", tmp_path / "source", rounded), tmp_path / "run")
    file = exported(run, tmp_path / "MODEL.GGUF", dtype)
    back = imported(file.rename(tmp_path / "a model"), tmp_path / "back")
    before, after = weights_of(run), weights_of(back)
    matrices = {name for name in before.names() if "norm" not in name}
    stored = {"f16": "float16", "bf16": "bfloat16"}[dtype]
    assert {after.dtypes()[name] for name in matrices} == {stored}
    for name in before.names():
        assert np.array_equal(before.array(name), after.array(name).astype(np.float32))


def test_llama_3_scaling_is_recognized(tmp_path: Path) -> None:
    factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 32.0}
    rope = {"rope_type": "llama3", "original_max_position_embeddings": 8192, "rope_theta": 5e5}
    source = copy("llama", tmp_path / "source", rope_parameters=rope | factors)
    file = exported(imported(source, tmp_path / "run"), tmp_path / "model.gguf", "f32")
    others = rewritten(file, tmp_path / "others.gguf", {"llama.rope.llama3": None})
    assert GGUFTensors(others).model.rope_scaling == GGUFTensors(file).model.rope_scaling
    lying = rewritten(file, tmp_path / "lying.gguf", {"llama.rope.llama3": [8.0, 1.0, 4.0, 8192.0]})
    with pytest.raises(UserError, match=r"rope_freqs\.weight: .* must be those of Llama 3"):
        GGUFTensors(lying)


YARN_KEYS = {
    "yarn_attn_factor": 0.1 * math.log(3) + 1,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"freq_base_swa": 50.0}, "rope.freq_base_swa: 50.0 is not supported; must be rope.freq_b"),
        *(({f"scaling.{key}": 1.5}, f"{key}: 1.5 is not supported; must be") for key in YARN_KEYS),
    ],
)
def test_positions_of_olmo_3_are_those_that_llama_cpp_computes(
    changed: dict[str, float], message: str | None, tmp_path: Path
) -> None:
    file = exported(imported_fixture("olmo3", tmp_path), tmp_path / "model.gguf", "f32")
    keys = {f"scaling.{key}": value for key, value in YARN_KEYS.items()}
    keys |= {"freq_base_swa": 60.0} | changed
    named = {f"olmo2.rope.{key}": value for key, value in keys.items()}
    converted = rewritten(file, tmp_path / "converted.gguf", named)
    if message is None:
        assert GGUFTensors(converted).model == GGUFTensors(file).model
        return
    with pytest.raises(UserError, match=message):
        GGUFTensors(converted)


# Content


def tensors_in(file: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def test_tensors_are_as_llama_cpp_wants_them(tmp_path: Path) -> None:
    """Halves of heads take turns; GPT-2's outputs come first, unlike in its own files; Gemma's
    norms have 1 added; experts are stacked, and routers stay float32."""

    def written(name: str, dtype: str = "f32") -> tuple[dict[str, gguf.ReaderTensor], Any]:
        run = imported_fixture(name, tmp_path / name)
        return tensors_in(exported(run, tmp_path / f"{name}.gguf", dtype)), arrays(MODELS / name)

    found, source = written("llama")
    query = source["model.layers.1.self_attn.q_proj.weight"]
    halves = query.reshape(6, 2, 4, 24)  # heads, halves, pairs, inputs
    pairs = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(48, 24)
    assert np.array_equal(found["blk.1.attn_q.weight"].data, pairs)
    value = source["model.layers.1.self_attn.v_proj.weight"]
    assert np.array_equal(found["blk.1.attn_v.weight"].data, value)

    found, source = written("gpt2")
    for ours, theirs in {"attn_qkv": "attn.c_attn", "ffn_down": "mlp.c_proj"}.items():
        wanted = source[f"transformer.h.1.{theirs}.weight"].T
        assert np.array_equal(found[f"blk.1.{ours}.weight"].data, wanted)

    found, source = written("gemma3")
    for ours, theirs in {
        "blk.2.post_ffw_norm": "model.layers.2.post_feedforward_layernorm",
        "blk.2.attn_q_norm": "model.layers.2.self_attn.q_norm",
        "output_norm": "model.norm",
    }.items():
        assert np.array_equal(found[f"{ours}.weight"].data, source[f"{theirs}.weight"] + 1)

    found, source = written("mixtral", "f16")
    names = [f"model.layers.1.block_sparse_moe.experts.{n}.w2.weight" for n in range(5)]
    wanted = np.stack([source[name] for name in names]).astype(np.float16)
    assert np.array_equal(found["blk.1.ffn_down_exps.weight"].data, wanted)
    assert found["blk.0.ffn_gate_inp.weight"].tensor_type == Kind.F32


def test_q8_0_is_that_of_the_gguf_package(tmp_path: Path) -> None:
    checkpoint, weights = from_scratch(tmp_path, **LLAMA | {"emb_dim": 64, "ffn_dim": 40})
    file = exported(checkpoint, tmp_path / "model.gguf", "q8_0")
    found = tensors_in(file)
    up = weights["blocks.feed_forward.up.kernel"][1].T
    assert np.array_equal(found["blk.1.ffn_up.weight"].data, quantize(up, Kind.Q8_0))
    assert found["blk.1.ffn_down.weight"].tensor_type == Kind.F16  # 40 is no multiple of 32
    assert found["blk.1.attn_norm.weight"].tensor_type == Kind.F32
    assert found["token_embd.weight"].tensor_type == Kind.Q8_0


# Tokenizers


@pytest.mark.parametrize("name", KNOWN_TOKENIZERS)
def test_tokenizers_come_back(name: str, tmp_path: Path) -> None:
    checkpoint = with_tokenizer(name, tmp_path, chat_template=TEMPLATE)
    export = GGUFExport(Export(str(checkpoint)), "q8_0")
    assert bool(export.notes) == (name in ("qwen", "mistral")), export.notes
    export.write(tmp_path / "model.gguf", "model")
    run = imported(tmp_path / "model.gguf", tmp_path / "run")
    before, after = (load_tokenizer(p) for p in (checkpoint, run / "checkpoints/imported"))
    assert after.begin == before.begin
    assert after.ends[:2] == before.ends[:2]
    assert after.vocab_size == before.vocab_size
    for text in ["The lamp on the ladder's\n\n 1,024 rungs", "naïve  日本 😀\t½", "\x00<table>"]:
        assert after.encode(text) == before.encode(text)
        assert after.decode(after.encode(text)) == before.decode(before.encode(text))
    assert ChatTemplate.load(run / "checkpoints/imported").source == TEMPLATE


def test_tokenizers_that_llama_cpp_lacks_are_refused(tmp_path: Path) -> None:
    checkpoint = with_tokenizer("gpt2", tmp_path / "second")
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="does not split texts as the tokenizer does"):
        GGUFExport(Export(str(checkpoint)), "f16")
    checkpoint = with_tokenizer("mistral", tmp_path / "third")
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="no scores give the tokenizer's merges"):
        GGUFExport(Export(str(checkpoint)), "f16")


# Refused models


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"feed_forward": "relu_squared", "qkv_bias": True}, "has no feed_forward"),
        ({"positions": "sinusoidal"}, "has no positions"),
        (LLAMA | {"value_embedding_every": 2, "emb_dim": 32}, "has no value_embedding_every 2"),
        (LLAMA | {"residual_scalars": True}, "has no residual_scalars true"),
        (LLAMA | {"sliding_window": 4}, "sliding_window 4"),
        (LLAMA | {"query_pre_attn_scalar": 9.0}, "has no query_pre_attn_scalar 9"),
        (LLAMA | MOE, "closest, qwen3moe, has no normalize_expert_weights false"),
        (LLAMA | {"layer_pattern": ["global", "nope"]}, "has no layer_pattern"),
        (LLAMA | OLMO | {"tied_embeddings": True}, "closest, olmo2, has no tied_embeddings true"),
        (GEMMA | {"tied_embeddings": True, "final_soft_cap": 3.0}, "has no final_soft_cap 3"),
    ],
)
def test_models_that_llama_cpp_lacks_are_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint, _ = from_scratch(tmp_path / "made", **keys)
    result = CliRunner().invoke(
        pretrained.main, ["export", str(checkpoint), str(tmp_path / "new/model.gguf")]
    )
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert not (tmp_path / "new").exists()


def test_values_that_overflow_are_refused(tmp_path: Path) -> None:
    tensors = arrays(MODELS / "llama")
    tensors["lm_head.weight"][0, 0] = 1e5
    run = imported(copy("llama", tmp_path / "source", tensors), tmp_path / "run")
    result = CliRunner().invoke(
        pretrained.main, ["export", str(run), str(tmp_path / "out/model.gguf")]
    )
    assert "output.weight: has values that overflow F16" in str(result.exception)
    assert list((tmp_path / "out").iterdir()) == []
    exported(run, tmp_path / "model.gguf", "bf16")


# Files from elsewhere


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf")
    return exported(with_tokenizer("mistral", place), place / "model.gguf", "q8_0")


def rewritten(file: Path, target: Path, changed: dict[str, Any]) -> Path:
    """Copy a file with other metadata; None removes a key."""
    reader = gguf.GGUFReader(file)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    values = {key: value for key, value in (fields | changed).items() if value is not None}
    writer = gguf.GGUFWriter(target, values.pop("general.architecture"))
    for key, value in values.items():
        kinds = gguf.GGUFValueType
        kind = kinds.UINT32 if type(value) is int else kinds.get_type(value)
        writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return target


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_damaged_files_are_refused(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    big_endian = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    finish(big_endian)
    parts = [content[:size] for size in (0, 3, 7, 24, 60, 5_000, 20_000, len(content) // 2)]
    foreign = b"GGML" + content[4:], content[:4] + b"\1" + content[5:]
    big = (tmp_path / "big.gguf").read_bytes()
    (tmp_path / "big.gguf").unlink()
    for damaged in (*parts, *foreign, content[:-33], big):
        (tmp_path / "bad.gguf").write_bytes(damaged)
        with pytest.raises(UserError, match=r"bad\.gguf: not a complete GGUF file: "):
            imported(tmp_path / "bad.gguf", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture: 'mamba' is not supported"),
        ({"split.count": 3}, "one of several parts"),
        ({"llama.attention.scale": 0.5}, "attention.scale: unknown key .* --ignore-key"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type: .* must be none or linear"),
        ({"llama.attention.head_count": 3}, "n_kv_heads: 2 does not divide n_heads 3"),
        ({"llama.block_count": 3}, "blk.2.attn_norm.weight: missing"),
        ({"llama.block_count": 10**9}, "n_layers"),
        ({"llama.embedding_length": 64}, "must have"),
        ({"llama.embedding_length": None}, "emb_dim"),
        ({"llama.attention.key_length": [4, 4]}, "must be equal"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model: 't5' is not supported"),
        ({"tokenizer.ggml.scores": [0.0]}, "zip|damaged"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "model.gguf|list index|range"),
        ({"general.alignment": 0}, "Invalid alignment"),
    ],
)
def test_metadata_that_lies_is_refused(
    changed: dict[str, Any], message: str, file: Path, tmp_path: Path
) -> None:
    other = rewritten(file, tmp_path / "model.gguf", changed)
    with pytest.raises(UserError, match=message):
        imported(other, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_0])
def test_other_quantizations_are_read(kind: Kind, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    checkpoint, _ = from_scratch(tmp_path, **LLAMA | {"emb_dim": 256, "ffn_dim": 256})
    source = gguf.GGUFReader(exported(checkpoint, tmp_path / "f32.gguf", "f32"))
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, field in source.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, field.contents(), field.types[0], *field.types[1:])
    stored = {}
    for tensor in source.tensors:
        data = tensor.data
        if tensor.name in ("blk.1.ffn_up.weight", "blk.1.ffn_down.weight"):
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data = rng.integers(0, 60, size=(256, 256 // block * size), dtype=np.uint8)
            stored[tensor.name] = data
        writer.add_tensor(
            tensor.name, data, raw_dtype=kind if tensor.name in stored else tensor.tensor_type
        )
    finish(writer)
    run = imported(tmp_path / "model.gguf", tmp_path / "run")
    for name, data in stored.items():
        matrix = name.removeprefix("blk.1.ffn_").removesuffix(".weight")
        found = weights_of(run).array(f"blocks.feed_forward.{matrix}.kernel")[1]
        assert np.array_equal(found, dequantize(data, kind).T)


# Commands


def test_commands_export_and_import(tmp_path: Path) -> None:
    run = imported_fixture("qwen3", tmp_path)

    def command(*arguments: object) -> Any:
        return CliRunner().invoke(pretrained.main, list(map(str, arguments)))

    file = tmp_path / "model.gguf"
    result = command("export", run, file, "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    assert "written without a tokenizer" in result.output
    assert "exists already" in str(command("export", run, file).exception)
    result = command("import", file, tmp_path / "back")
    assert result.exit_code == 0, result.output
    assert "model.gguf: qwen3" in result.output
    assert "leave out --revision" in str(
        command("import", file, tmp_path / "x", "--revision", "main").exception
    )
    assert "leave it out" in str(command("import", file, tmp_path / "x", "--check").exception)
    assert "whose name ends in .gguf" in str(
        command("export", run, tmp_path / "folder", "--dtype", "f16").exception
    )
    assert "leave it out" in str(command("export", run, tmp_path / "a.gguf", "--adapter").exception)
