"""A compilation cache that cannot be read or written costs a compilation, but stops no run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.tmpfs import make_read_only, make_writable, needs_mount, tmpfs
from tests.support.committed_runs import ROOT

PROGRAM = """
from rungs.parallel import jax_setup
jax_setup.enable_compilation_cache()
import jax
print(jax.jit(lambda x: x * 3 + 1)(2.0), jax.jit(lambda x: x - 9)(5.0))
"""


def start(cache: Path) -> list[str]:
    """Compile two functions in a new process; return the lines of its stderr."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
    )
    assert ended.stdout == "7.0 -4.0\n"
    return ended.stderr.splitlines()


@pytest.mark.long
@needs_mount
def test_a_full_cache(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "cache", 4096) as cache:
        (line,) = start(cache)
        assert line.startswith(f"{cache}: cannot write the compilation cache: OSError")
        assert "No space left on device" in line
        assert len(start(cache)) <= 1  # a part of it fitted and is read


@pytest.mark.long
@needs_mount
def test_a_read_only_cache_with_torn_entries(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "cache", 1_000_000) as cache:
        assert start(cache) == []
        for entry in cache.glob("*-cache"):
            entry.write_bytes(entry.read_bytes()[:40])
        make_read_only(cache)
        lines = start(cache)
        make_writable(cache)
        assert len(lines) <= 1
        assert start(cache) == []
        assert all(entry.stat().st_size > 40 for entry in cache.glob("*-cache"))


@pytest.mark.long
def test_a_cache_that_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert len(start(tmp_path / "cache")) <= 1
    assert len(start(tmp_path / "cache" / "below")) <= 1
