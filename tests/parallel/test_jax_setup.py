"""Compiled code is kept between starts, a torn entry mended quietly; freed memory is kept."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.committed_runs import ROOT

PROGRAM = """
from rungs.parallel import jax_setup
jax_setup.enable_compilation_cache()
import jax
print(jax.jit(lambda x: x * 3 + 1)(2.0))
"""

FREEING = """
import resource, sys
import numpy as np
from rungs.parallel import jax_setup
if sys.argv[1] == "kept":
    jax_setup.keep_freed_memory()
for turn in range(20):
    np.ones(1 << 23)  # 64 MB, freed at once
    if turn == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_memory_that_was_freed_is_not_mapped_anew() -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FREEING, how]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        return int(done.stdout)

    assert faults("given back") > 5_000
    assert faults("kept") < 1_000
