"""Published models of every size, as runs that train them from scratch. For each, `presets.json`
has its id on the Hugging Face hub, the keys of its `config.json` that describe the architecture,
and the learning rate of GPT-3's model of about its size (Brown et al. 2020, table 2.1); and the
other keys of `train.json`, which are the same for all."""

import functools
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.common.plugins import unknown_name
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.config.reference import schema_key
from rungs.huggingface.config_keys import HFConfig
from rungs.huggingface.families import family_of
from rungs.run.derive import create_from
from rungs.run.folder import new_run_path

_FILE = Path(__file__).with_suffix(".json")


@functools.cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(strict_json.read_text(_FILE))
    return content


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(_content()["models"])


def preset_model(name: str) -> ModelConfig:
    """Return a preset's architecture. Raises UserError if there is no such preset."""
    hf_config = HFConfig(Path(_FILE.name), _find(name)["config"])
    return family_of(hf_config).to_model_config(hf_config)


def create_preset(
    name: str, preset: str, settings: Sequence[str], keep: bool = True
) -> AbstractContextManager[Path]:
    """Create the run folder `name` that trains a preset's model from scratch, with `settings`
    changed; as `derive.create_like`. Raises UserError if there is no such preset."""
    files = {
        run_config.MODEL_FILE: preset_model(preset).model_dump(mode="json", exclude_defaults=True),
        run_config.TRAIN_FILE: _content()["train"]
        | {"learning_rate": _find(preset)["learning_rate"]},
    }
    folder = new_run_path(name)
    contents = {file: schema_key(folder, file) | keys for file, keys in files.items()}
    return create_from(name, contents, preset, settings, keep)


def _find(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise UserError(f"--preset: {unknown_name('preset', name, preset_names())}")
    found: dict[str, Any] = _content()["models"][name]
    return found
