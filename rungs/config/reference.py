"""Generates the JSON schemas of the config files and the page of all their keys."""

import json
import os
from pathlib import Path
from typing import Any

from rungs.common.paths import checkout
from rungs.common.strict_json import StrictModel
from rungs.config.base import Config, may_change
from rungs.config.run_config import FILE_TYPES, NESTED


def json_schema(config_type: type[Config]) -> str:
    """Return the JSON schema of a config file, as in `schemas/`."""
    return json.dumps(config_type.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def schema_key(folder: Path, name: str) -> dict[str, str]:
    """Return the key that names the JSON schema of a config file in `folder`, relative to it; no
    key outside of a checkout, which has the schemas."""
    root, target = checkout(), folder.resolve()
    if root is None or not target.is_relative_to(root):
        return {}
    path = os.path.relpath(root / "schemas" / _schema_file(name), target)
    return {"$schema": Path(path).as_posix()}


def _schema_file(name: str) -> str:
    return name.replace(".json", ".schema.json")


def reference_page() -> str:
    """Return a Markdown page of each file's keys with type, default and meaning."""
    lines = [
        "# Configuration",
        "",
        "Every key of a run's files: `model.json`, and `train.json` or, in reinforcement learning,",
        "`reinforce.json`. `uv run config.py` generates it from `rungs/config/`.",
    ]
    for name, file_type in FILE_TYPES.items():
        lines += ["", f"## `{name}`", "", *_key_table(file_type)]
        for key, nested in NESTED[name].items():
            lines += ["", f"### `{key}`", "", *_key_table(nested)]
    return "\n".join(lines) + "\n"


def _key_table(config_type: type[StrictModel]) -> list[str]:
    schema = config_type.model_json_schema()
    rows = ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    own = vars(config_type)["__annotations__"]
    properties, changeable = schema["properties"].items(), may_change(config_type)
    for key, entry in sorted(properties, key=lambda property: property[0] not in own):
        default = f"`{json.dumps(entry['default'])}`" if "default" in entry else "required"
        meaning = entry.get("description", "").replace("\n", " ")
        if key in changeable:
            meaning += " *May change when a run is resumed.*"
        rows.append(f"| `{key}` | {_allowed(entry)} | {default} | {meaning} |")
    return rows


def _allowed(entry: dict[str, Any]) -> str:
    """Describe in words what an entry of a JSON schema allows."""
    if alternatives := entry.get("anyOf") or entry.get("oneOf"):
        return " or ".join(_allowed(alternative) for alternative in alternatives)
    if "enum" in entry:
        return ", ".join(f"`{json.dumps(value)}`" for value in entry["enum"])
    if "const" in entry:
        return f"`{json.dumps(entry['const'])}`"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    given = {limit: entry[limit] for limit in limits if abs(entry.get(limit, 2**31)) < 2**31 - 1}
    words = " and ".join(f"{limits[limit]} {value:,}" for limit, value in given.items())
    return f"{entry.get('type', 'object')} {words}".rstrip()


def write_generated_files(root: Path) -> None:
    """Write the JSON schemas and the page of keys."""
    for name, file_type in FILE_TYPES.items():
        path = root / "schemas" / _schema_file(name)
        path.write_text(json_schema(file_type), encoding="utf-8")
    (root / "docs" / "configuration.md").write_text(reference_page(), encoding="utf-8")
