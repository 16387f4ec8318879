"""Strict reading of JSON files: reports all errors at once, one line each, by key."""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from rungs.common.errors import UserError, did_you_mean, reason

_MOST_ERRORS, _MOST_SHOWN = 50, 60
_checks: set[Callable[..., Any]] = set()
F = TypeVar("F", bound=Callable[[Any], Iterator[str]])


def check(method: F) -> F:
    """Register a `StrictModel` method that checks keys and yields lines "key: what is wrong"."""
    _checks.add(method)
    return method


@functools.cache
def _checks_of(model: type) -> list[FunctionType]:
    """Return the checks of a class, base classes first."""
    members = [member for base in reversed(model.__mro__) for member in vars(base).values()]
    return [each for each in members if isinstance(each, FunctionType) and each in _checks]


class StrictModel(BaseModel):
    """A frozen JSON object: unknown keys fail, types are exact, numbers are finite."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        if lines := self.problems():
            raise ValueError("\n".join(lines))
        return self

    def problems(self) -> list[str]:
        """Return the lines of all checks. A check ends where it needs a key that is missing."""
        lines: list[str] = []
        for each in _checks_of(type(self)):
            try:
                for line in each(self):
                    lines.append(line)
            except AttributeError:
                if len(self.__dict__) == len(type(self).model_fields):
                    raise
        return lines


def read_text(path: Path) -> str:
    """Return a file's text; raises UserError if it is missing, unreadable or not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


M = TypeVar("M", bound=StrictModel)


def parse(
    text: str,
    path: Path | str,
    model: type[M],
    elsewhere: Mapping[str, type[StrictModel]] | None = None,
) -> M:
    """Parse `text`, the contents of `path`, a file or a line of one, as a `model`. Raises UserError
    with a line for each error: file, key, value and what is allowed. `elsewhere` has the models of
    the folder's other files by file name, as an unknown key may belong there."""
    values, lines = _parse_object(text, path)
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        name = Path(path).name
        others: dict[str, type[StrictModel]] = {name: model, **(elsewhere or {})}
        found = _errors_in(error, values)
        for each in found[:_MOST_ERRORS]:
            lines += [f"{path}: {line}" for line in _error_lines(each, name, others)]
        if (more := len(found) - _MOST_ERRORS) > 0:
            lines.append(f"{path}: and {more:,} more errors")
        if wrong := {str(e["loc"][0]) for e in found if e["loc"]}:
            lines += [f"{path}: {line}" for line in _partial(model, values, wrong).problems()]
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))
    return config


def value_problems(values: Any, model: type[StrictModel]) -> list[str]:
    """Return one line "key: what is wrong" per error in a JSON value, without its file's name."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        found = _errors_in(error, values)[:_MOST_ERRORS]
        return [line for e in found for line in _error_lines(e, "", {"": model})]
    return []


def _errors_in(error: ValidationError, values: Any) -> list[Any]:
    """Return an error for each place, keys and indices of `values`, with all that pydantic says of
    it, one for each kind of a union. What is wrong as a whole hides its parts; else a wrong part
    hides what says that its object or array is of another kind."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for each in error.errors():
        found.setdefault(_place(each, values), []).append(each)
    for place, kinds in found.items():
        judged = [each for each in kinds if each["type"] == "value_error"]
        known = [each for each in kinds if each["type"] != "extra_forbidden"]
        found[place] = judged or known or kinds
    whole = {place for place, kinds in found.items() if kinds[0]["type"] == "value_error"}
    seen = {one for one in found if not any(one[:size] in whole for size in range(len(one)))}
    seen -= {one[:size] for one in seen for size in range(len(one))} - whole
    return [
        {**kinds[0], "loc": place, "kinds": kinds}
        for place, kinds in found.items()
        if place in seen
    ]


def _place(error: Any, values: Any) -> tuple[Any, ...]:
    """Return an error's place without the names that pydantic gives to the kinds of a union."""
    place = []
    for part in error["loc"]:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            continue
        place.append(part)
    return (*place, error["loc"][-1]) if error["type"] == "missing" else tuple(place)


def parse_value(text: str) -> Any:
    """Return a JSON value, or `text` itself if it is none. Raises UserError if it has a key
    twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except UserError:
        raise
    except (ValueError, RecursionError):
        return text


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for line in _given_twice(pairs):
        raise UserError(line)
    return dict(pairs)


def _given_twice(pairs: list[tuple[str, Any]]) -> Iterator[str]:
    counts = Counter(key for key, _ in pairs)
    for key in (key for key, count in counts.items() if count > 1):
        yield f"{format_name(key)}: given more than once; keep one"


def _parse_object(text: str, path: Path | str) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON object in `text` and a line for each key given twice."""
    twice: list[str] = []

    def note_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(f"{path}: {line}" for line in _given_twice(pairs))
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=note_duplicates)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # could not be written to a file
        raise UserError(f"{path}: holds an invalid character (a lone surrogate)") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        place = f"{line}column {error.colno}"
        raise UserError(f"{path}: malformed JSON at {place}: {error.msg}") from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path}: unreadable JSON: {reason(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object {{…}}, not {format_value(value)}")
    return value, twice


def _partial(model: type[M], values: dict[str, Any], wrong: set[str]) -> M:
    """Return the object without its wrong keys, for checks that do not need them."""
    right = {key: _typed(model, key, values[key]) for key in values.keys() - wrong}
    partial = model.model_construct(**right)
    for key in wrong:
        partial.__dict__.pop(key, None)
    return partial


def _typed(model: type[M], key: str, value: Any) -> Any:
    """Return the valid value of a key, with nested objects parsed."""
    if (field := model.model_fields.get(key)) is None:
        return value
    kind: Any = field.annotation
    return TypeAdapter(kind).validate_python(value)


_ALLOWED = {
    **dict.fromkeys(("too_short", "string_too_short"), "must not be empty"),
    "model_type": "must be an object {…}",
}
_WORDING = {
    "Value error, ": "",
    "Input should be": "must be",
    "a valid boolean": "true or false",
    "a valid": "of type",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "of type dictionary": "an object {…}",
    "String should match pattern": "must match",
}


def _error_lines(error: Any, file: str, models: Mapping[str, type[StrictModel]]) -> list[str]:
    """Return one of pydantic's errors as lines with key, value and what is allowed."""
    parts = [str(part) for part in error["loc"]]
    key = format_name(".".join(parts))
    if error["type"] == "value_error" and not parts:
        return str(error["ctx"]["error"]).splitlines()
    if error["type"] == "extra_forbidden":
        advice = _advice(parts, file, models)
        return [f"{key}: unknown key (value {format_value(error['input'])}){advice}"]
    if error["type"] == "missing":
        return [f"{key}: missing; this key is required"]
    allowed = " or ".join(dict.fromkeys(map(_allowed, error["kinds"])))
    return [f"{key}: {format_value(error['input'])} is not allowed; {allowed}"]


def _allowed(error: Any) -> str:
    allowed: str = _ALLOWED.get(error["type"], error["msg"])
    for theirs, ours in _WORDING.items():
        allowed = allowed.replace(theirs, ours)
    return allowed


def _advice(parts: Sequence[str], file: str, models: Mapping[str, type[StrictModel]]) -> str:
    """Suggest a key for an unknown one. `parts` are keys and indices to it."""
    inside = [models[file]]
    for part in parts[:-1]:
        fields = [each.model_fields[part] for each in inside if part in each.model_fields]
        if fields:  # else an index
            inside = [inner for field in fields for inner in _models_in(field.annotation)]
    keys = [field.alias or key for each in inside for key, field in each.model_fields.items()]
    others = [
        other
        for other, model in models.items()
        if len(parts) == 1 and parts[0] in model.model_fields
    ]
    known = f"it belongs in {others[0]}" if others else f"the keys are {', '.join(keys)}"
    return f"; {did_you_mean(parts[-1], keys, known)}" if keys else ""


def _models_in(annotation: Any) -> list[type[StrictModel]]:
    """Return the models that a type is or contains."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def json_checksum(content: Any) -> str:
    """Return the sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def format_value(value: Any) -> str:
    """Return a JSON value as one line of at most 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "a value nested too deeply to show"
    if not text.isprintable():
        text = json.dumps(value, default=str)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def format_name(name: str) -> str:
    """Return the name of a key or tensor, in JSON if it is long or has unprintable characters."""
    return name if name.isprintable() and len(name) <= _MOST_SHOWN else format_value(name)
