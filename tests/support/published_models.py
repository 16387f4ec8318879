"""Small models in published formats: the committed ones and modified copies of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
NAMES = sorted(path.name for path in MODELS.iterdir())
Arrays = dict[str, np.ndarray]


def arrays(folder: Path) -> Arrays:
    """Return all tensors of a folder."""
    found: Arrays = {}
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def expected(name: str) -> Arrays:
    """Return what transformers computes with a committed model."""
    with safe_open(MODELS / name / "expected.safetensors", framework="numpy") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def copy(name: str, folder: Path, changed: Arrays | None = None, **keys: Any) -> Path:
    """Copy a committed model to a new folder, with other tensors or with config keys changed."""
    folder.mkdir(parents=True)
    config = json.loads((MODELS / name / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    if changed is None:
        for path in MODELS.joinpath(name).glob("model*"):
            shutil.copy(path, folder)
    else:
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


def assert_same(found: Arrays, wanted: Arrays) -> None:
    """Assert the same names, dtypes and bits."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name
