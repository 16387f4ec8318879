"""What has to be installed beside JAX, Flax, Optax, Orbax and PyTorch."""

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator

from benchmarks.gpu_parts.setting import ROOT

GIVEN = "jax", "flax", "optax", "orbax-checkpoint", "torch"
"""What the environment has, with all that these install; PyTorch may be in another one."""
NEEDS = (
    *("annotated-types", "array-record", "attrs", "click", "cloudpickle", "cycler", "filelock"),
    *("fonttools", "grain", "kiwisolver", "matplotlib", "packaging", "pillow", "platformdirs"),
    *("portpicker", "pydantic", "pydantic-core", "pyparsing", "python-dateutil", "safetensors"),
    *("six", "tokenizers", "tqdm", "typing-inspection"),
)
"""Everything else that is imported. Each part of a rehearsal fails if it imports more."""
_NOT_NEEDED = {"rungs-lm", "ipython", "traitlets"}
"""Found on the path, or imported by Flax where it is installed."""


def requirements() -> list[str]:
    """Return a line for each distribution that is needed: its version here, or what is missing."""
    ranges = {_name(line): line for line in _dependencies()}
    return [_requirement(name, ranges.get(name, name)) for name in _needed()]


def missing() -> list[str]:
    """Return what is needed and not installed."""
    given = [name for name in GIVEN if name != "torch"]
    return [name for name in (*given, *_needed()) if _version(name) is None]


def _needed() -> list[str]:
    """Return those of `NEEDS` that this project requires, or something that is installed."""
    required = {*map(_name, _dependencies())} | _required((*GIVEN, *NEEDS))
    return [name for name in NEEDS if name in required]


def undeclared() -> list[str]:
    """Return the distributions that this process has imported although no list names them."""
    owners = importlib.metadata.packages_distributions()
    modules = {name.partition(".")[0] for name in sys.modules}
    imported = {normal(owner) for module in modules for owner in owners.get(module, ())}
    return sorted(imported - _closure(GIVEN) - {*NEEDS} - _NOT_NEEDED)


def _closure(names: Iterable[str]) -> set[str]:
    """Return distributions with all that they install, as far as they are here."""
    return {name for name in {*names} | _required(names) if _version(name) is not None}


def _required(names: Iterable[str]) -> set[str]:
    """Return what distributions require, and what that requires, as far as they are here."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if _version(name) is not None:
            lines = importlib.metadata.requires(name) or ()
            new = {_name(line) for line in lines if "extra ==" not in line} - found
            found |= new
            left += new
    return found


def _requirement(name: str, wanted: str) -> str:
    version = _version(name)
    return f"{name}=={version}" if version else f"{wanted}  # not installed"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dependencies() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from project["dependencies"]


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return normal(found[0])


def normal(name: str) -> str:
    """Return a distribution's name as the package index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()
