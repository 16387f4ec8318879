"""Adapters for peft: its formula, with the base model's tensors, gives the merged model's."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from rungs.checkpointing.weights_file import Weights, write_weights
from rungs.cli import pretrained
from rungs.common.errors import UserError
from rungs.huggingface.exporting import Adapter
from rungs.huggingface.importing import Import, find_source, import_model
from rungs.step.state import shapes_of
from tests.support.configs import ONE_FILE, train_config
from tests.support.published_models import MODELS, arrays

ALL = ["query", "key", "value", "output", "up", "down"]
LORA = {"rank": 3, "alpha": 12.0}


def trained(name: str, place: Path, **keys: Any) -> Path:
    """Import a model and write a checkpoint with random LoRA weights."""
    run = place / "run"
    import_model(Import.from_source(find_source(str(MODELS / name))), run)
    imported = Weights(run / "checkpoints" / "imported" / "model.safetensors")
    lora = {**LORA, **keys}
    train = train_config(start_from="imported", lora=lora)
    shapes = shapes_of(imported.header.model, train.lora)
    rng = np.random.default_rng(0)
    weights = {
        tensor: imported.array(tensor)
        if tensor in imported.names()
        else rng.normal(size=shape).astype(np.float32)
        for tensor, shape in shapes.items()
    }
    folder = run / "checkpoints" / "trained"
    folder.mkdir()
    write_weights(folder, weights, imported.header._replace(train=train), ONE_FILE)
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gpt2", ["query", "value"]),
        ("gpt2", ALL),
        ("llama", [*ALL, "gate"]),
        ("gemma3", ["value", "gate"]),
        ("qwen2", ["key"]),
        ("olmo2", [*ALL, "gate"]),
        ("olmo3", ["query", "key"]),
        ("smollm3", [*ALL, "gate"]),
        ("qwen3-moe", ["query", "output"]),
    ],
)
def test_the_formula_of_peft_gives_the_merged_model(
    name: str, targets: list[str], tmp_path: Path
) -> None:
    weights = trained(name, tmp_path, targets=targets)
    result = CliRunner().invoke(
        pretrained.main, ["export", str(weights), str(tmp_path / "adapter"), "--adapter"]
    )
    assert result.exit_code == 0, result.output
    assert f"for BASE give a folder or id with which transformers loads {name}" in result.output
    CliRunner().invoke(pretrained.main, ["export", str(weights), str(tmp_path / "merged")])
    base, merged = arrays(MODELS / name), arrays(tmp_path / "merged")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    adapted = {name.rsplit(".lora_", 1)[0] for name in tensors}
    changed = {tensor for tensor in base if not np.array_equal(base[tensor], merged[tensor])}
    assert {f"{module.removeprefix('base_model.model.')}.weight" for module in adapted} == changed
    for module in adapted:
        target = next(t for t in config["target_modules"] if module.endswith(f".{t}"))
        rank = config["rank_pattern"].get(target, config["r"])
        scale = config["alpha_pattern"].get(target, config["lora_alpha"]) / rank
        a, b = (tensors[f"{module}.lora_{kind}.weight"].astype(np.float64) for kind in "AB")
        assert a.shape[0] == b.shape[1] == rank
        added = scale * (b @ a)
        plain = module.removeprefix("base_model.model.") + ".weight"
        expected = base[plain] + (added.T if config["fan_in_fan_out"] else added)
        limit = 1e-6 * np.abs(expected).max()
        np.testing.assert_allclose(merged[plain], expected, rtol=0, atol=limit)


def changed(weights: Path, folder: Path, names: Iterable[str], **parts: Any) -> Path:
    """Write some tensors of a checkpoint again, with other parts of its header."""
    stored = Weights(weights)
    folder.mkdir()
    arrays_of = {name: stored.array(name) for name in names}
    write_weights(folder, arrays_of, stored.header._replace(**parts), ONE_FILE)
    return folder


def test_the_base_of_an_adapter(tmp_path: Path) -> None:
    weights = trained("llama", tmp_path, targets=["query"])
    header, names = Weights(weights).header, Weights(weights).names()
    assert header.train is not None
    assert header.origin is not None
    later = header.train.model_copy(update={"start_from": "runs/before"})
    origin = header.origin.model_copy(update={"source": "some/llama", "revision": "0" * 40})
    for kind, part, line, base in (
        (
            "later",
            {"train": later},
            "transformers loads runs/before",
            "runs/before",
        ),
        ("hub", {"origin": origin}, ".from_pretrained('some/llama')", "some/llama"),
    ):
        run = changed(weights, tmp_path / kind, names, **part)
        out = tmp_path / f"{kind}-adapter"
        result = CliRunner().invoke(pretrained.main, ["export", str(run), str(out), "--adapter"])
        assert line in result.output
        config = json.loads((out / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == base
    plain = changed(weights, tmp_path / "plain", shapes_of(header.model), train=train_config())
    with pytest.raises(UserError, match="was not trained with lora, so it has no adapter"):
        Adapter(str(plain))
