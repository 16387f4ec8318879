"""The file of a GPU session: what was measured so far, on what, with which code.

It is written anew after each figure, and a table of the same figures beside it.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import click

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import GPT2_SMALL, ROOT
from rungs.common.machine import processor
from rungs.common.shown_text import align_columns, format_duration

FORMAT = 1
State = Literal["measuring", "done", "stopped", "failed", "skipped"]
"""Of a part. "measuring" in a file that nothing writes to: the session was killed."""
LIBRARIES = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"


class Results:
    """What a session has measured.

    Attributes:
        path: of the JSON.
        content: of the JSON.
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self.content = path, content

    @classmethod
    def open(
        cls, place: Path, rehearse: bool, fresh: bool, torch: Mapping[str, str] | None = None
    ) -> Self:
        """Continue a file, or begin one.

        Args:
            place: the file; or a folder, for a file named after the device, with a checksum of all
                that the figures depend on.
            fresh: begin a new one in its place.
            torch: versions of PyTorch and what belongs to it.

        Raises:
            UsageError: the file is not one of these, or of another machine, other versions or
                other code.
        """
        new = {
            "format": FORMAT,
            "rehearsal": rehearse,
            "measured": describe(rehearse, torch or {}),
            "begun": time.strftime("%Y-%m-%d"),
            "parts": {},
        }
        is_file = bool(place.suffix) and not place.is_dir()
        path = place if is_file else place / _file_name(new)
        if fresh or not path.exists():
            return cls(path, new)
        before = read(path)
        for key in ("format", "rehearsal", "measured"):
            if before[key] != new[key]:
                raise click.UsageError(
                    f"{path}: of another machine, other versions or other code; choose another"
                    " --into, or --fresh to measure all again"
                )
        is_complete = all(part["state"] == "done" for part in before["parts"].values())
        return cls(path, new if rehearse and is_complete else before)

    def is_done(self, part: str) -> bool:
        return bool(self._part(part).get("state") == "done")

    def tries(self, part: str) -> int:
        """Return the place of a part in the order of measuring: 0 if it was not tried, 1 if it was
        not finished, 2 if it failed."""
        states = {"measuring": 1, "stopped": 1, "failed": 2}
        return states.get(self._part(part).get("state", ""), 0)

    def seconds_before(self, part: str) -> float:
        """Return how long a part was tried before it was stopped; 0 if it was not."""
        before = self._part(part)
        return float(before["seconds"]) if before.get("state") == "stopped" else 0.0

    def _part(self, part: str) -> dict[str, Any]:
        found: dict[str, Any] = self.content["parts"].get(part, {})
        return found

    def begin(self, part: str, what: str) -> None:
        """Begin a part; figures of an earlier try stay until new ones replace them.

        Args:
            what: is measured.
        """
        state = {"state": "measuring", "seconds": 0.0, "why": ""}
        self._write(part, what=what, **state, benchmarks=benchmarks_checksum())

    def add(self, part: str, figure: Figure) -> None:
        """Add a figure, or replace the one of the same name."""
        others = [one for one in self._part(part)["figures"] if one["name"] != figure.name]
        self._write(part, figures=[*others, figure._asdict()])

    def skip(self, part: str, why: str) -> None:
        """Record why a part was not measured; what is known from an earlier try stays."""
        if not self._part(part):
            self._write(part, state="skipped", seconds=0.0, why=why)

    def end(
        self, part: str, state: State, seconds: float, why: str = "", errors: Sequence[str] = ()
    ) -> None:
        """Record how a part ended.

        Args:
            errors: the last lines of what it wrote to stderr.
        """
        own = {"state": state, "seconds": round(seconds, 1), "why": why, "errors": list(errors)}
        self._write(part, **own, gpu_state="" if self.content["rehearsal"] else gpu_state())

    def _write(self, part: str, **changes: Any) -> None:
        parts = self.content["parts"]
        parts[part] = {"figures": [], **parts.get(part, {}), **changes}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for path, text in (
            (self.path, json.dumps(self.content, indent=1) + "\n"),
            (self.path.with_suffix(".txt"), self.table()),
        ):
            new = path.with_suffix(path.suffix + ".new")
            new.write_text(text)
            new.replace(path)

    @property
    def problems(self) -> list[str]:
        """What is wrong: parts that failed, and figures that have a problem."""
        found = []
        for name, part in self.content["parts"].items():
            if part["state"] == "failed":
                found.append(f"{name}: failed: {part['why']}")
            wrong = [figure for figure in figures_of(part) if figure.problem]
            found += [f"{name}, {figure.name}: {figure.problem}" for figure in wrong]
        return found

    def missing(self, parts: Iterable[str]) -> list[str]:
        """Return the parts that are not done."""
        return [part for part in parts if not self.is_done(part)]

    @property
    def headline(self) -> str:
        return headline(self.content)

    def table(self) -> str:
        """Return all figures as text."""
        return "\n".join([self.headline, *self._tables()]) + "\n"

    def _tables(self) -> Iterator[str]:
        for name, part in self.content["parts"].items():
            took = f", {format_duration(part['seconds'])}" if part.get("seconds") else ""
            why = f": {part['why']}" if part.get("why") else ""
            yield f"\n{name} ({part['state']}{took}){why}"
            rows = [(f"  {one.name}", one.as_text(), mark(one)) for one in figures_of(part)]
            if rows:
                yield align_columns(rows, left=3)


def read(path: Path) -> dict[str, Any]:
    """Return the content of a file.

    Raises:
        UsageError: it is not one of these.
    """
    try:
        content = json.loads(path.read_text())
        assert content.keys() >= {"format", "rehearsal", "measured", "parts"}
    except (OSError, ValueError, AssertionError, AttributeError):
        raise click.UsageError(f"{path}: not a file that on_a_gpu.py writes") from None
    return dict(content)


def _file_name(content: dict[str, Any]) -> str:
    """Return the name of a session's file: of the device, with a checksum of all that the figures
    depend on."""
    measured = content["measured"]
    device = "rehearsal" if content["rehearsal"] else measured["device"].partition(",")[0]
    checksum = hashlib.sha256(json.dumps(measured).encode()).hexdigest()[:8]
    return re.sub(r"[^a-z0-9]+", "-", f"{device} {checksum}".lower()) + ".json"


def figures_of(part: dict[str, Any]) -> list[Figure]:
    return [Figure(**figure) for figure in part["figures"]]


def mark(figure: Figure) -> str:
    """Return what stands beside a figure."""
    wrong = f"WRONG: {figure.problem}" if figure.problem else ""
    return "; ".join(filter(None, (figure.note, wrong)))


def headline(content: dict[str, Any]) -> str:
    measured = content["measured"]
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    kind = "rehearsal on " if content["rehearsal"] else ""
    return (
        f"{kind}{measured['device']}; {measured['processor']}\n{versions}; code {measured['code']}"
    )


def describe(rehearse: bool, torch: Mapping[str, str]) -> dict[str, Any]:
    """Return what figures depend on: the device, the versions, the code."""
    return {
        "device": "CPU" if rehearse else nvidia_gpu(),
        "processor": processor(),
        "versions": {"Python": platform.python_version(), **installed(LIBRARIES), **torch},
        "code": code_checksum(),
    }


def nvidia_gpu() -> str:
    """Return the first GPU's name, memory, driver and power limit.

    Raises:
        UsageError: there is none.
    """
    found = _query("name,memory.total,driver_version,power.limit")
    if not found:
        raise click.UsageError("no NVIDIA GPU: nvidia-smi failed; --rehearse runs on a CPU")
    name, memory, driver, limit = found.split(", ")
    return f"{name}, {memory}, driver {driver}, at most {limit}"


def gpu_state() -> str:
    """Return clocks, power, temperature and throttling, which explain odd figures."""
    return _query("clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active")


def _query(fields: str) -> str:
    """Return what nvidia-smi says of the first GPU that may be used; empty if it fails."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    command += [f"--id={visible}"] if visible else []
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return next(iter(shown.stdout.splitlines()), "")


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def code_checksum() -> str:
    """Return a checksum of what is measured; it needs no git."""
    names = "layers", "parity-pretrain", "parity-rl", GPT2_SMALL.name
    runs = [path for name in names for path in (ROOT / "runs" / name).glob("*.json")]
    package, checks = (ROOT / "rungs").rglob("*.py"), (ROOT / "smoke_tests").glob("*.py")
    return _checksum([*package, *checks, *ROOT.glob("*.py"), *runs])


def benchmarks_checksum() -> str:
    """Return a checksum of what measures."""
    return _checksum((ROOT / "benchmarks").rglob("*.py"))


def _checksum(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(os.fsencode(path.relative_to(ROOT)) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]
