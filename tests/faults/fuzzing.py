"""Fuzzing: Hypothesis strategies for bad files, and what must hold for whatever reads them.

By default the examples are few and always the same. With RUNGS_FUZZ_FACTOR=20 in the environment,
`uv run pytest tests/faults -k fuzzed` tries 20 times as many, and others each time.
"""

import contextlib
import copy
import json
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rungs.common.errors import UserError, system_error

FACTOR = int(os.environ.get("RUNGS_FUZZ_FACTOR", "1"))
DEADLINE_SECONDS = 60
LONGEST_LINE = 1000

T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[Any]], Any]
Fault = Callable[[Path], None]
"""Puts something bad in place of a file."""


def examples(count: int) -> settings:
    """Return settings for so many examples, times the factor."""
    return settings(
        max_examples=count * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# Assertions


def attempt(
    action: Callable[[], T], folder: Path, *naming: str, may_change: tuple[str, ...] = ()
) -> T | UserError:
    """Return the action's result, or the UserError that it raises.

    Asserts that it ends in time, that its error is readable and that it does not change the folder.

    Args:
        naming: every line of the error must contain one of these.
        may_change: names of files that Rungs may rewrite.
    """
    before = snapshot(folder, may_change)
    outcome: T | UserError
    try:
        with deadline():
            outcome = action()
    except UserError as error:
        outcome = error
        assert_clear(str(error), naming)
    except OSError as error:  # which a command reports by itself
        reported = system_error(error)
        assert reported is not None
        outcome = UserError(str(reported))
    assert snapshot(folder, may_change) == before
    return outcome


def assert_clear(message: str, naming: tuple[str, ...] = ()) -> None:
    """Every line is short, printable and names what it is about."""
    lines = message.split("\n")
    assert len(lines) < 200
    for line in lines:
        assert line.strip(), message
        assert line.isprintable(), ascii(line)
        assert len(line) <= LONGEST_LINE, line
        assert not naming or any(name in line for name in naming), line


def snapshot(folder: Path, ignored: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return every path under a folder with its content."""
    return {
        path.relative_to(folder).as_posix(): _content(path)
        for path in sorted(folder.rglob("*"))
        if path.name not in ignored
    }


def _content(path: Path) -> Any:
    if path.is_symlink():
        return path.readlink()
    return path.read_bytes() if path.is_file() else path.lstat().st_mode


@contextlib.contextmanager
def deadline(seconds: float = DEADLINE_SECONDS) -> Iterator[None]:
    """Fail a block that takes longer, even if it waits for a file."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """Let this process allocate only so many more bytes; only on Linux."""
    if sys.platform != "linux":
        yield
        return
    status = Path("/proc/self/status").read_text()
    allocated = 1024 * int(re.findall(r"VmData:\s+(\d+)", status)[0])
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (allocated + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


# Bad bytes

_INSERTED = (b"\xef\xbb\xbf", b"\0", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"{", b'"', b"\n\n")


@st.composite
def bad_bytes(draw: Draw, valid: bytes) -> bytes:
    """A file truncated, doubled, padded or emptied, or with bytes flipped, added or deleted."""
    place = draw(st.integers(0, max(len(valid) - 1, 0)))
    match draw(st.sampled_from(["cut", "flip", "insert", "delete", "double", "pad", "other"])):
        case "cut":
            return valid[:place]
        case "flip":
            flipped = bytearray(valid)
            flipped[place] ^= 1 << draw(st.integers(0, 7))
            return bytes(flipped)
        case "insert":
            return valid[:place] + draw(st.sampled_from(_INSERTED)) + valid[place:]
        case "delete":
            return valid[:place] + valid[place + draw(st.integers(1, 8)) :]
        case "double":
            return valid + valid
        case "pad":
            return valid + bytes(draw(st.integers(1, 4096)))
    other: bytes = draw(st.sampled_from([b"", b"\xef\xbb\xbf" + valid]) | st.binary(max_size=64))
    return other


# Bad JSON

RAW_JSON = {
    "not a number": "NaN",
    "infinity": "-Infinity",
    "too large for a float": "1e999",
    "too small for a float": "-1e-999",
    "minus zero": "-0",
    "400 digits": "1" * 400,
    "5,000 digits": "1" * 5000,
    "half a character": r'"\ud800"',
    "half a character as key": r'{"\ud800": 1}',
    "key given twice": '{"a": 1, "a": 2}',
    "300 objects deep": '{"a":' * 300 + "1" + "}" * 300,
    "700 lists deep": "[" * 700 + "]" * 700,
    "20,000 objects deep": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "100,000 lists deep": "[" * 100_000 + "]" * 100_000,
}
"""Values that `json.dumps` does not write, by the strings that stand for them until `as_json`."""
ODD_TEXTS = (
    "",
    " ",
    ".",
    "..",
    "../../escape",
    "/etc/passwd",
    "/dev/zero",
    "~/x",
    "a\0b",
    "a\nb",
    "\x1b[31mred",
    "back\\slash",
    "a//b",
    "\u202eover",
    "\u2028",
    "é" * 300,
    "x" * 5000,
    "none",
    "imported",
    "0",
    "1e3",
)

odd_values: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(sorted(RAW_JSON)),
    st.sampled_from(ODD_TEXTS),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    st.sampled_from([-1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30]),
    st.sampled_from([[], {}, [[]], [None], {"": ""}, [1, 2, 3], {"a": {"b": []}}, ["x", "y"]]),
)


def as_json(value: Any) -> bytes:
    """Return a value as JSON, with the names of raw JSON replaced by it."""
    text = json.dumps(value)
    for name, raw in RAW_JSON.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode()


def _key_of(draw: Draw, value: Any) -> Any:
    """Draw a key of an object or an index of a list; None if it is empty."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return draw(st.sampled_from(keys)) if keys else None


@st.composite
def bad_object(draw: Draw, valid: dict[str, Any]) -> bytes:
    """A JSON object with one to three items dropped, replaced, added or given twice."""
    value = copy.deepcopy(valid)
    twice = b""
    for _ in range(draw(st.integers(1, 3))):
        parent: Any = value
        while (key := _key_of(draw, parent)) is not None:
            if not isinstance(parent[key], dict | list) or draw(st.integers(0, 2)) == 0:
                break
            parent = parent[key]
        else:
            continue
        match draw(st.sampled_from(["replace", "replace", "replace", "drop", "add", "twice"])):
            case "replace":
                parent[key] = copy.deepcopy(draw(odd_values))
            case "drop":
                del parent[key]
            case "add" if isinstance(parent, dict):
                name = draw(st.sampled_from(ODD_TEXTS) | st.text(max_size=5))
                parent[name] = copy.deepcopy(draw(odd_values))
            case _:
                twice = as_json({str(key): draw(odd_values)})[1:-1] + b","
    return b"{" + twice + as_json(value)[1:]


def bad_json(valid: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Return strategies for the content of a JSON file that may be wrong in any way."""
    text = json.dumps(valid, indent=1).encode()
    encoded = st.sampled_from(["utf-16", "utf-32", "utf-8-sig"]).map(text.decode().encode)
    other = odd_values.map(as_json)
    return st.one_of(bad_object(valid), bad_object(valid), bad_bytes(text), encoded, other)


# Bad safetensors

_DTYPES = ["F4", "F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64", "C64", "BOOL", "I64", "U8", "X"]
_LENGTHS = [0, 1, 7, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]


def safetensors(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """Return a file of this header and data that claims this length of its header."""
    claimed = len(header) if length is None else length
    return claimed.to_bytes(8, "little") + header + data


@st.composite
def bad_safetensors(draw: Draw, valid: bytes) -> bytes:
    """A safetensors file whose header is wrong about its length, a dtype, shape, offset or name."""
    length = int.from_bytes(valid[:8], "little")
    header, data = json.loads(valid[8 : 8 + length]), valid[8 + length :]
    names = sorted(set(header) - {"__metadata__"})
    name = draw(st.sampled_from(names))
    entry = header[name]
    match draw(st.sampled_from(["length", "dtype", "shape", "offset", "twice", "name", "keys"])):
        case "length":
            claimed = draw(st.sampled_from(_LENGTHS) | st.integers(0, 2 * length))
            return safetensors(as_json(header), data, claimed)
        case "dtype":
            entry["dtype"] = draw(st.sampled_from(_DTYPES))
        case "shape":
            sizes = st.sampled_from([0, 1, 2, 2**31, 2**32, 2**62, 2**63, 2**64, -1])
            entry["shape"] = draw(st.lists(sizes, max_size=4))
        case "offset":
            offsets = st.sampled_from([0, 8, len(data), len(data) + 8, 2**62, 2**64 - 1, 2**64, -8])
            entry["data_offsets"] = draw(st.lists(offsets, min_size=1, max_size=3))
        case "twice":
            again = as_json({name: entry, draw(st.sampled_from(names)): entry})
            return safetensors(again[:-1] + b"," + as_json(header)[1:], data)
        case "name":
            header[draw(st.sampled_from(ODD_TEXTS))] = header.pop(name)
        case "keys":
            return safetensors(draw(bad_object(header)), data)
    return safetensors(as_json(header), data)


def bad_weights(valid: bytes) -> st.SearchStrategy[bytes]:
    """Return strategies for the content of a safetensors file that may be wrong in any way."""
    return st.one_of(bad_safetensors(valid), bad_safetensors(valid), bad_bytes(valid))


# Bad files


class Write(NamedTuple):
    """Writes content to a file."""

    content: bytes

    def __call__(self, path: Path) -> None:
        _replace(path, lambda: path.write_bytes(self.content))


def in_place(content: st.SearchStrategy[bytes]) -> st.SearchStrategy[Fault]:
    """Return faults that write the content or, now and then, replace the file by something else."""
    write = content.map(Write)
    return st.one_of(write, write, write, write, no_file)


def put(path: Path, content: bytes) -> None:
    """Write a file, whatever is there."""
    Write(content)(path)


def _replace(path: Path, make: Callable[[], object]) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    make()


def absent(path: Path) -> None:
    _replace(path, lambda: None)


def folder(path: Path) -> None:
    _replace(path, path.mkdir)


def link_to_nothing(path: Path) -> None:
    _replace(path, lambda: path.symlink_to("nothing"))


no_file: st.SearchStrategy[Fault] = st.sampled_from([absent, folder, link_to_nothing])
