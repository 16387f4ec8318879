"""Eight virtual CPU devices, code compiled quickly and cached between runs, and which tests run."""

import ctypes
import datetime
import gc
import logging
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # The processes of the tests would all compile JAX's modules again: seconds each.
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["PYTHONPYCACHEPREFIX"]

import hypothesis
import jax
import pytest

from rungs.common import run_log
from rungs.optim import precision
from rungs.parallel import jax_setup
from tests.support import reused_contexts, triton_lowering
from tests.support.charts import draw_no_charts
from tests.support.compilation_flags import QUICK_COMPILATION
from tests.support.shared_traces import share_traces

LEFT_OUT = pytest.StashKey[int]()
"""How many long tests were not chosen."""

gc.set_threshold(100_000, 20, 100)  # tracing makes many objects that live; a module's end collects
jax.config.update("jax_num_cpu_devices", 8)
jax_setup.enable_compilation_cache()
triton_lowering.allow_on_cpus()
reused_contexts.reuse()
hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one stalls for seconds
hypothesis.settings.load_profile("any machine")
precision.fastest_dtype = lambda: "float32"  # the same on every machine


def pytest_addoption(parser: pytest.Parser) -> None:
    # Splits the long tests into N parts by a hash of their names, so that a test stays in its part
    # when others come and go. `today` takes the next part each day. Other tests are not affected:
    # `pytest tests -m "long or not long" --long-part=today/4` runs them all, and a quarter of the
    # long ones.
    parser.addoption(
        "--long-part", metavar="K/N", help="Part K, or `today`, of N of the long tests."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leave the long tests out of a plain `pytest`. `pytest tests/faults` and any other choice of
    tests runs all of its tests.

    A plain `pytest` spends most of its time on compiling, so XLA compiles as it does fastest.
    """
    config.addinivalue_line("markers", "long: left out of a plain `pytest`")
    is_plain = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_plain and not config.option.markexpr:
        config.option.markexpr = "not long"
    if config.option.markexpr == "not long":  # the workers' option, too
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = " ".join([*QUICK_COMPILATION, flags]).strip()
    assert jax.device_count() == 8
    if config.option.long_part is not None:
        # workers get the option from here, and so the same day
        config.option.long_part = "{}/{}".format(*long_part(config.option.long_part))


def long_part(text: str) -> tuple[int, int]:
    """Return K from 1 to N, and N."""
    found = re.fullmatch(r"(\d+|today)/([1-9]\d*)", text)
    if found is None:
        raise pytest.UsageError(f"--long-part={text}: not K/N or today/N")
    parts = int(found[2])
    part = datetime.date.today().toordinal() % parts + 1 if found[1] == "today" else int(found[1])
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--long-part={text}: K must be from 1 to {parts}")
    return part, parts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.long_part is None:
        return
    part, parts = long_part(config.option.long_part)
    others = [
        item
        for item in items
        if item.get_closest_marker("long") and zlib.crc32(item.nodeid.encode()) % parts != part - 1
    ]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def pytest_collection_finish() -> None:
    gc.freeze()  # else each collection of garbage goes through all modules and tests


def pytest_deselected(items: list[pytest.Item]) -> None:
    if long := [item for item in items if item.get_closest_marker("long")]:
        stash = long[0].config.stash
        stash[LEFT_OUT] = stash.get(LEFT_OUT, 0) + len(long)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the number from a worker: each has collected all tests."""
    if output := getattr(node, "workeroutput", None):  # a worker that crashed has none
        node.config.stash[LEFT_OUT] = output["left_out"]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    count = config.stash.get(LEFT_OUT, 0)
    if count and config.option.markexpr == "not long":
        terminalreporter.write_line(
            f"Left out: {count} long tests. `uv run pytest tests -m long` runs them, and with"
            " `--long-part=today/6` another sixth of them each day."
        )


@pytest.fixture(scope="module", autouse=True)
def return_memory() -> Iterator[None]:
    """Return the memory of a module's compiled programs to the system. Without this a worker grows
    by hundreds of MB with each module. Without `malloc_trim`, glibc keeps what JAX has freed."""
    yield
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture(autouse=True)
def log_as_imported() -> Iterator[None]:
    """Undo what a command does to the log: pytest catches messages twice if a logger that does not
    propagate starts to."""
    yield
    run_log.log.handlers, run_log.log.propagate = [], True
    run_log.log.setLevel(logging.NOTSET)


@pytest.fixture
def shared_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    share_traces(monkeypatch)


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_no_charts(monkeypatch)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What Rungs logs."""
    logger = logging.getLogger("rungs")
    propagates, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO, "rungs"):
        yield caplog
    logger.propagate = propagates
