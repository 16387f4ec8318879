"""Whatever a published model's folder contains, it is imported or reported in clear lines, and none
of its code is run."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from rungs.common.errors import UserError
from rungs.huggingface.importing import Import, find_source, import_model
from tests.faults.fuzzing import (
    Fault,
    attempt,
    bad_json,
    bad_weights,
    examples,
    in_place,
    put,
)
from tests.support.published_models import MODELS, arrays

FAMILIES = [
    "gemma3-vision",
    "gpt2",
    "llama",
    "llama-tied-llama3-scaling",
    "mixtral",
    "olmo3",
    "qwen2-sliding",
    "qwen3-moe-sliding",
    "smollm3",
]
CONFIGS = {name: json.loads((MODELS / name / "config.json").read_text()) for name in FAMILIES}
SHARDED = MODELS / "llama-sharded"
INDEX = "model.safetensors.index.json"


def check(folder: Path) -> Import:
    """Do all that an import does before it writes."""
    found = Import.from_source(find_source(str(folder)))
    assert found.summary()
    for name in found.match.names.values():
        found.tensors.bits(name)
    return found


def copy_model(name: str, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in MODELS.joinpath(name).glob("[cmt]*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@examples(30)
@given(data=st.data())
def test_any_config_json(name: str, data: st.DataObject, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        copy_model(name, folder)
    data.draw(in_place(bad_json(CONFIGS[name])))(folder / "config.json")
    attempt(lambda: check(folder), tmp_path, "config.json", str(folder))


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma2", "llama", "smollm3", "olmo3"])
def test_a_config_of_very_many_layers_is_an_error_at_once(name: str, tmp_path: Path) -> None:
    folder = copy_model(name, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10**10}
    config.pop("layer_types", None)
    put(folder / "config.json", json.dumps(config).encode())
    assert isinstance(attempt(lambda: check(folder), tmp_path, "config.json"), UserError)


@examples(40)
@given(fault=in_place(bad_json(json.loads((SHARDED / INDEX).read_text()))))
def test_any_index(fault: Fault, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        copy_model("llama-sharded", folder)
    fault(folder / INDEX)
    attempt(lambda: check(folder), tmp_path, str(folder))


GPT2 = arrays(MODELS / "gpt2")


@examples(50)
@given(fault=in_place(bad_weights(save(GPT2, {"format": "pt"}))))
def test_any_safetensors_file(fault: Fault, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        copy_model("gpt2", folder)
    fault(folder / "model.safetensors")
    attempt(lambda: check(folder), tmp_path, str(folder))


def test_code_beside_a_model_is_not_copied_or_run(tmp_path: Path) -> None:
    folder = copy_model("gpt2", tmp_path / "model")
    for name in ("modeling_gpt2.py", "configuration.py", "setup.py", "__init__.py"):
        (folder / name).write_text("raise SystemExit('executed')")
    import_model(check(folder), tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.py"))
    config = CONFIGS["gpt2"] | {"auto_map": {"AutoModel": "modeling_gpt2.Evil"}}
    put(folder / "config.json", json.dumps(config).encode())
    outcome = attempt(lambda: check(folder), tmp_path, "config.json")
    assert isinstance(outcome, UserError)
