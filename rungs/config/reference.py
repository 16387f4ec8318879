"""Generates the JSON schemas of the config files and the page of all their keys."""

import functools
import json
import operator
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rungs.common.paths import checkout, shipped
from rungs.common.strict_json import StrictModel
from rungs.config.base import Config, may_change
from rungs.config.run_config import FILE_TYPES, NESTED


def schema_key(folder: Path, name: str) -> dict[str, str]:
    """Return the key that names the JSON schema of a config file in `folder`, relative to it; no
    key outside of the checkout or, without one, the working directory, which have the schemas."""
    root, target = checkout() or Path.cwd(), folder.resolve()
    if not target.is_relative_to(root):
        return {}
    path = os.path.relpath(root / "schemas" / _schema_file(name), target)
    return {"$schema": Path(path).as_posix()}


def write_schemas() -> None:
    """Without a checkout, write the schemas that come with Rungs into the working directory, for
    editors, unless they are there."""
    if checkout() is None and not Path("schemas").exists():
        shutil.copytree(shipped() / "schemas", "schemas", dirs_exist_ok=True)


def _schema_file(name: str) -> str:
    return name.replace(".json", ".schema.json")


def reference_page(more: Mapping[str, Sequence[type[Config]]] = {}) -> str:
    """Return a Markdown page of each file's keys with type, default and meaning; `more` as for
    `write_generated_files`."""
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
    for name, kinds in more.items():
        common = kinds[0].__base__
        assert common is not None
        lines += ["", f"## `{name}`", "", *_key_table(common)]
        for kind in kinds:
            lines += ["", f"### `{kind.__name__.lower()}`", "", *_own_keys(kind, common)]
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


def _own_keys(kind: type[Config], common: type[Config]) -> list[str]:
    """Return the table of a kind's keys, without those that are the same for all."""
    own = vars(kind)["__annotations__"]
    shared = {each.alias or key for key, each in common.model_fields.items() if key not in own}
    return [row for row in _key_table(kind) if row.split("`")[1:2] not in [[key] for key in shared]]


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


def write_generated_files(root: Path, more: Mapping[str, Sequence[type[Config]]] = {}) -> None:
    """Write the JSON schemas and the page of keys. `more` has files that are one of several kinds,
    which have the keys of their common base class."""
    schemas = {name: file_type.model_json_schema() for name, file_type in FILE_TYPES.items()}
    for name, kinds in more.items():
        of_any: Any = functools.reduce(operator.or_, kinds)
        schemas[name] = TypeAdapter(of_any).json_schema()
    for name, schema in schemas.items():
        text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        (root / "schemas" / _schema_file(name)).write_text(text, encoding="utf-8")
    (root / "docs" / "configuration.md").write_text(reference_page(more), encoding="utf-8")
