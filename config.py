"""`model.json` and `train.json` of a run folder: read, checked, compared, documented.

Run as a program it brings the JSON schemas and the page of keys up to date.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import strict_json
from config_file import Config
from errors import UserError
from misfits import misfits
from model_config import ModelConfig, MupConfig, RopeScaling
from strict_json import StrictModel
from train_config import LoraConfig, ShardingConfig, TrainConfig


class RunConfig(NamedTuple):
    """Both files of a run folder, checked."""

    model: ModelConfig
    train: TrainConfig


MODEL_FILE, TRAIN_FILE = "model.json", "train.json"
FILE_TYPES: dict[str, type[Config]] = {MODEL_FILE: ModelConfig, TRAIN_FILE: TrainConfig}
NESTED: dict[str, dict[str, type[StrictModel]]] = {
    MODEL_FILE: {"rope_scaling": RopeScaling, "mup": MupConfig},
    TRAIN_FILE: {"sharding": ShardingConfig, "lora": LoraConfig},
}
"""The objects that keys of a file hold."""


def load_run(run_folder: Path | str) -> RunConfig:
    """Read and check `model.json` and `train.json` of a run folder.

    Raises:
        UserError: with one line for each mistake in either file, or in the two together.
    """
    return _check(run_folder, dict.fromkeys(FILE_TYPES))


def check_texts(run_folder: Path | str, model_text: str, train_text: str) -> RunConfig:
    """As `load_run`, for texts that do not stand in the folder yet."""
    return _check(run_folder, {MODEL_FILE: model_text, TRAIN_FILE: train_text})


def _check(run_folder: Path | str, texts: dict[str, str | None]) -> RunConfig:
    configs: dict[str, Any] = {}
    mistakes: list[str] = []
    for name, text in texts.items():
        path = Path(run_folder) / name
        try:
            text = strict_json.read_text(path) if text is None else text
            configs[name] = strict_json.parse(text, path, FILE_TYPES[name], FILE_TYPES)
        except UserError as error:
            mistakes.append(str(error))
    if not mistakes:
        found = RunConfig(configs[MODEL_FILE], configs[TRAIN_FILE])
        mistakes = [f"{Path(run_folder) / TRAIN_FILE}: {line}" for line in misfits(*found)]
    if mistakes:
        raise UserError("\n".join(mistakes))
    return found


C = TypeVar("C", bound=Config)


def differences(old: C, new: C) -> dict[str, tuple[Any, Any]]:
    """The keys in which two configs differ, each with its old and its new value."""
    before, after = old.as_json(), new.as_json()
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def json_schema(config_type: type[Config]) -> str:
    """The JSON schema of a config file, as the text that stands under `schemas/`."""
    return json.dumps(config_type.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def reference_page() -> str:
    """Every key of both files with its type, default and meaning, as Markdown."""
    lines = [
        "# Configuration",
        "",
        "Every key of a run's two files. This page is written by `uv run config.py`.",
    ]
    for name, file_type in FILE_TYPES.items():
        lines += ["", f"## `{name}`", "", *_key_table(file_type)]
        for key, nested in NESTED[name].items():
            lines += ["", f"### `{key}`", "", *_key_table(nested)]
    return "\n".join(lines) + "\n"


def _key_table(config_type: type[StrictModel]) -> list[str]:
    schema = config_type.model_json_schema()
    rows = ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    for key, entry in schema["properties"].items():
        default = json.dumps(entry["default"]) if "default" in entry else "needed"
        meaning = entry.get("description", "").replace("\n", " ")
        if key in getattr(config_type, "MAY_CHANGE", ()):
            meaning += " *May change between two starts of a run.*"
        rows.append(f"| `{key}` | {_allowed(entry)} | `{default}` | {meaning} |")
    return rows


def _allowed(entry: dict[str, Any]) -> str:
    """What a JSON schema's entry lets through, in words."""
    if alternatives := entry.get("anyOf") or entry.get("oneOf"):
        return " or ".join(_allowed(alternative) for alternative in alternatives)
    if "enum" in entry:
        return ", ".join(f"`{json.dumps(value)}`" for value in entry["enum"])
    if "const" in entry:
        return f"`{json.dumps(entry['const'])}`"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    told = {limit: entry[limit] for limit in limits if abs(entry.get(limit, 2**31)) < 2**31 - 1}
    words = [f"{limits[limit]} {value:,}" for limit, value in told.items()]
    return " ".join([entry.get("type", "object"), *words])


def write_generated_files(root: Path) -> None:
    """Bring the JSON schemas and the page of keys up to date."""
    for name, file_type in FILE_TYPES.items():
        path = root / "schemas" / name.replace(".json", ".schema.json")
        path.write_text(json_schema(file_type), encoding="utf-8")
    (root / "docs" / "configuration.md").write_text(reference_page(), encoding="utf-8")


if __name__ == "__main__":
    write_generated_files(Path(__file__).parent)
