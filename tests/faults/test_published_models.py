"""A published model that asks for too much is refused; code that comes with one is not run."""

import json
import shutil
from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.huggingface.importing import Import, find_source, import_model
from tests.faults.fuzzing import attempt, put
from tests.support.published_models import MODELS


def check(folder: Path) -> Import:
    """Do all that an import does before it writes."""
    found = Import.from_source(find_source(str(folder)))
    assert found.summary()
    for name in found.match.names.values():
        found.tensors.bits(name)
    return found


def copy_model(name: str, folder: Path) -> Path:
    folder.mkdir()
    for path in MODELS.joinpath(name).glob("[cmt]*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma2", "llama", "smollm3", "olmo3"])
def test_a_config_of_very_many_layers_is_an_error_at_once(name: str, tmp_path: Path) -> None:
    folder = copy_model(name, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10**10}
    config.pop("layer_types", None)
    put(folder / "config.json", json.dumps(config).encode())
    assert isinstance(attempt(lambda: check(folder), tmp_path, "config.json"), UserError)


def test_code_beside_a_model_is_not_copied_or_run(tmp_path: Path) -> None:
    folder = copy_model("gpt2", tmp_path / "model")
    for name in ("modeling_gpt2.py", "configuration.py", "setup.py", "__init__.py"):
        (folder / name).write_text("raise SystemExit('executed')")
    import_model(check(folder), tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.py"))
    config = json.loads((folder / "config.json").read_text()) | {
        "auto_map": {"AutoModel": "modeling_gpt2.Evil"}
    }
    put(folder / "config.json", json.dumps(config).encode())
    outcome = attempt(lambda: check(folder), tmp_path, "config.json")
    assert isinstance(outcome, UserError)
