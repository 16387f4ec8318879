"""Compiled code is kept between starts; a torn entry is mended, quietly."""

import os
import subprocess
import sys
from pathlib import Path

from tiny_run import ROOT

PROGRAM = """
import runtime
runtime.cache_compiled_code()
import jax
print(jax.jit(lambda x: x * 3 + 1)(2.0))
"""


def start(cache: Path) -> str:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.stdout == "7.0\n"
    return done.stderr


def test_torn_entries_are_replaced_without_a_word(tmp_path: Path) -> None:
    start(tmp_path)
    entries = sorted((tmp_path / "rungs" / "compiled").glob("*-cache"))
    assert entries
    sizes = {entry: entry.stat().st_size for entry in entries}
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:40])
    assert "compilation cache" not in start(tmp_path)
    for entry, size in sizes.items():
        assert entry.stat().st_size > size / 2
