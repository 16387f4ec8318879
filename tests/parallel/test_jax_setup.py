"""The compilation cache between starts, and memory that is kept when it is freed."""

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
import re, sys, threading
import numpy as np
from rungs.parallel import jax_setup

def mapped_megabytes():
    return int(re.findall(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[0]) // 1024

def use(megabytes):
    np.ones(megabytes << 17)  # freed at once

jax_setup.keep_freed_memory()
if sys.argv[1] == "on a GPU":
    jax_setup.settle("gpu")
if sys.argv[1] == "on a CPU":
    jax_setup.settle("cpu")
before = mapped_megabytes()
for _ in range(3):
    use(64)
    thread = threading.Thread(target=use, args=(32,))
    thread.start()
    thread.join()
print(mapped_megabytes() - before)
"""
"""Prints by how much the process's address space has grown, which no other process changes."""


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


@pytest.mark.long
def test_truncated_cache_entries_are_replaced_without_a_warning(tmp_path: Path) -> None:
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
@pytest.mark.parametrize(
    ("how", "least", "most"),
    [
        ("on a CPU", 64, 95),
        pytest.param("on a GPU", 0, 31, marks=pytest.mark.long),
    ],
)
def test_freed_memory_is_kept_and_used_again_by_any_thread_on_a_cpu(
    how: str, least: int, most: int
) -> None:
    command = [sys.executable, "-c", FREEING, how]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert least <= int(ended.stdout) <= most
