"""Eight virtual CPU devices, code compiled quickly and cached between runs, and which tests run."""

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# `nohup` and background jobs of a shell ignore these signals, and so would the tests' processes
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
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
from rungs.training.background import ChartProcess
from tests.support import charts, reused_contexts, triton_lowering
from tests.support.compilation_flags import QUICK_COMPILATION
from tests.support.shared_steps import sharing_steps
from tests.support.shared_traces import share_traces

gc.set_threshold(100_000, 20, 100)  # tracing makes many objects that live; a module's end collects
jax.config.update("jax_num_cpu_devices", 8)
jax_setup.enable_compilation_cache()
triton_lowering.allow_on_cpus()
reused_contexts.reuse()
charts.draw_none()
hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one stalls for seconds
hypothesis.settings.load_profile("any machine")
precision.fastest_dtype = lambda: "float32"  # the same on every machine


def pytest_configure(config: pytest.Config) -> None:
    """Leave the long tests out of a plain `pytest`. `pytest tests/faults` and any other choice of
    tests runs all of its tests."""
    config.addinivalue_line("markers", "long: left out of a plain `pytest`")
    is_plain = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_plain and not config.option.markexpr:
        config.option.markexpr = "not long"
    flags = os.environ.get("XLA_FLAGS", "")  # tests spend most of their time on compiling
    os.environ["XLA_FLAGS"] = " ".join([*QUICK_COMPILATION, flags]).strip()
    assert jax.device_count() == 8


def pytest_collection_finish() -> None:
    gc.freeze()  # else each collection of garbage goes through all modules and tests


@pytest.fixture(scope="module", autouse=True)
def return_memory() -> Iterator[None]:
    """Return the memory of a module's compiled programs to the system. Without this a worker grows
    by hundreds of MB with each module. Without `malloc_trim`, glibc keeps what JAX has freed."""
    yield
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


@pytest.fixture(scope="module", autouse=True)
def shared_steps() -> Iterator[None]:
    with sharing_steps():
        yield


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
def drawn_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw charts, as they do outside tests."""
    monkeypatch.setattr(ChartProcess, "_draw", charts.draw)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What Rungs logs."""
    logger = logging.getLogger("rungs")
    propagates, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO, "rungs"):
        yield caplog
    logger.propagate = propagates
