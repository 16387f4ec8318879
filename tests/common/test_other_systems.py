"""macOS and Windows as far as they can be simulated, and where the code differs for them."""

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rungs.checkpointing import checkpoint_folder
from rungs.common import disk, links, paths
from rungs.common.errors import UserError
from rungs.run.folder import RunFolder, new_run_path
from rungs.tasks.verifiers import opening
from tests.support import other_systems
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import assert_same_outcome, command, make_dataset, make_run, train

SYSTEMS: tuple[other_systems.System, ...] = ("darwin", "win32")
SOURCES = [
    path for pattern in ("*.py", "rungs/**/*.py", "smoke_tests/*.py") for path in ROOT.glob(pattern)
]


def on_windows(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Let modules of Rungs see Windows' `sys.platform`."""
    for module in modules:
        monkeypatch.setattr(module, "sys", SimpleNamespace(platform="win32"))


# Programs on a simulated system

IMPORT_ALL = """
import importlib, os, pkgutil, sys
import rungs
assert (sys.platform, hasattr(os, "sched_getaffinity")) == (sys.argv[1], False)
for name in rungs.__all__:
    getattr(rungs, name)
for module in pkgutil.walk_packages(rungs.__path__, "rungs."):
    if module.name.endswith("_child"):
        continue  # a program of its own
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # of an optional library, not of Python
        if error.name.partition(".")[0] in {*sys.stdlib_module_names, "rungs"}:
            raise
"""


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_can_be_imported(system: other_systems.System, tmp_path: Path) -> None:
    environment = other_systems.environment(system, tmp_path) | {"JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    line = [sys.executable, "-c", IMPORT_ALL, system]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("*.py")))
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_command_shows_its_help(
    system: other_systems.System, script: str, tmp_path: Path
) -> None:
    if script == "install_uv.py":
        pytest.skip("has no options")
    environment = other_systems.environment(system, tmp_path)
    line = [sys.executable, str(ROOT / script), "--help"]
    done = subprocess.run(line, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_dataset(folder)
    return folder


LONG = {"min_train_tokens": 150 * 128, "checkpoint_interval": 20}
"""150 steps, which take longer than another process takes to start."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, datasets: Path) -> RunFolder:
    """A run that was never stopped, trained on this system."""
    run = make_run(tmp_path_factory.mktemp("runs") / "expected", **LONG)
    done = train(run, datasets)
    assert done.returncode == 0, done.stderr
    return run


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_is_locked_stopped_killed_and_resumed(
    system: other_systems.System, tmp_path: Path, datasets: Path, expected: RunFolder
) -> None:
    run, syncs = make_run(tmp_path / "run", sample_prompts=[], **LONG), tmp_path / "syncs"
    environment = other_systems.environment(system, tmp_path)
    environment[other_systems.FULL_SYNCS] = str(syncs)
    line = command(run, datasets)

    def start(*options: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*line, *options], env=environment, stderr=subprocess.PIPE, text=True, errors="replace"
        )

    stopped = start("--supervise")
    wait_for(run.checkpoints / "latest", stopped)
    _, errors = (second := start()).communicate()
    assert (second.returncode, "in use by process" in errors) == (2, True), errors
    number = other_systems.SIGBREAK if system == "win32" else signal.SIGTERM
    stopped.send_signal(number)
    _, errors = stopped.communicate()
    assert stopped.returncode == 128 + number, errors
    assert "saving after this step" in errors

    killed, before = start(), checkpoint_folder.link_target(run.checkpoints / "latest")
    while killed.poll() is None:
        if checkpoint_folder.link_target(run.checkpoints / "latest") != before:
            killed.kill()
    killed.communicate()
    done = train(run, datasets, env=environment)
    assert done.returncode == 0, done.stderr

    assert_same_outcome(run, expected)
    assert len(run.charts) == len(expected.charts)
    assert (run.checkpoints / "best").is_symlink() == (system == "darwin")
    assert checkpoint_folder.link_target(run.checkpoints / "best") is not None
    assert syncs.exists() == (system == "darwin")
    assert not [path for path in run.path.rglob("*") if is_odd(path.name)]


def is_odd(name: str) -> bool:
    """Whether Windows refuses a file name."""
    with pytest.MonkeyPatch.context() as patch:
        on_windows(patch, paths)
        return not paths.is_plain_name(name)


# What differs, piece by piece


def test_a_file_that_is_open_on_windows_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [PermissionError(13, "used by another process")] * 2

    def refuse(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if refusals:
                raise refusals[-1]
            return real(*arguments)

        return call

    monkeypatch.setattr(disk.time, "sleep", lambda _: refusals.pop())
    monkeypatch.setattr(Path, "replace", refuse(Path.replace))
    with pytest.raises(PermissionError):
        disk.replace_file(tmp_path / "file", "text")
    on_windows(monkeypatch, disk)
    disk.replace_file(tmp_path / "file", "text")
    assert ((tmp_path / "file").read_text(), refusals) == ("text", [])


def test_what_stays_open_on_windows_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "used by another process")

    on_windows(monkeypatch, disk)
    monkeypatch.setattr(disk, "_SECONDS_WHILE_OPEN", 0.1)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError, match="used by another process"):
        disk.rename(tmp_path / "a", tmp_path / "b")


def test_a_link_on_windows_is_a_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "best"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    links.point(link, "one")
    assert link.is_symlink()
    on_windows(monkeypatch, links)
    for name in ("one", "two"):
        links.point(link, name)
        assert (link.is_symlink(), link.read_text()) == (False, f"{name}\n")
        assert checkpoint_folder.link_target(link) == name
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "best"}


def test_a_file_system_without_links_has_a_text_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    (tmp_path / "one").mkdir()
    links.point(tmp_path / "best", "one")
    assert checkpoint_folder.link_target(tmp_path / "best") == "one"


@pytest.mark.parametrize(
    "name", ["con", "NUL", "aux.json", "Com1.txt", "lpt9", "a.", "a ", "a:b", "what?", "a|b", "<a>"]
)
def test_names_that_windows_does_not_allow_are_refused_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_run_path(name)
    on_windows(monkeypatch, paths)
    assert not paths.is_plain_name(name)
    for path in (name, f"{name}/run", f"runs/{name}"):
        with pytest.raises(UserError, match="not a name that Windows allows; choose another"):
            new_run_path(path)


@pytest.mark.parametrize(
    "name", ["console", "nul-1", "a.con", "com10", "learning_rate=1e-3,seed=0", ".hidden", "l.a"]
)
def test_other_names_are_allowed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_windows(monkeypatch, paths)
    assert paths.is_plain_name(name)
    assert new_run_path(name) == Path("runs", name)


def test_windows_runs_no_verifier_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    on_windows(monkeypatch, opening)
    limits: Any = SimpleNamespace(verifier_timeout_seconds=1, verifier_memory_bytes=1 << 30)
    with pytest.raises(UserError, match="Windows can't limit a verifier"):
        opening._started("verifier.py", "def reward(**_): return 1", limits, None)


ENDLESS = (
    b'["{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}", "", {}]'
)


def test_an_endless_chat_template_is_stopped_without_timers(tmp_path: Path) -> None:
    environment = other_systems.environment("win32", tmp_path)
    program = ROOT / "rungs" / "data" / "chats" / "template_sandbox.py"
    done = subprocess.run(
        [sys.executable, "-P", str(program)],
        env=environment,
        input=ENDLESS + b"\n",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")


# Nothing else depends on the system

DEPENDENT_MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "msvcrt", "ctypes"}
DEPENDENT_NAMES = {
    *("sys.platform", "os.name", "os.uname", "os.symlink", "os.fsync"),
    *("os.killpg", "os.kill", "os.fork", "os.nice", "os.pread", "os.sysconf", "os.getuid"),
}
DEPENDENT_METHODS = {"symlink_to", "hardlink_to", "send_signal"}
DEPENDENT_OPTIONS = {"start_new_session", "creationflags", "preexec_fn", "process_group"}
ASKED_MODULES = {"os", "signal", "errno", "subprocess"}
"""Modules with other names on other systems, of which code asks with hasattr and getattr."""
KERNEL_FILES = ("/proc/", "/sys/", "/dev/")

ISOLATED = {
    "rungs/common/machine.py": "cores, memory, limits, malloc",
    "rungs/common/disk.py": "syncing, open files, hard links, flags of open",
    "rungs/common/links.py": "symlinks",
    "rungs/common/locks.py": "locks",
    "rungs/common/paths.py": "file names; where an open folder is",
    "rungs/common/signals.py": "signals",
    "rungs/common/helper_process.py": "starting, signaling and killing processes",
    "rungs/common/errors.py": "an errno that Windows lacks",
    "rungs/data/chats/template_sandbox.py": "a program of its own: limits of time and memory",
    "rungs/tasks/verifiers/reward_child.py": "a program of its own, not on Windows",
    "rungs/tasks/verifiers/opening.py": "refuses verifiers in Python on Windows",
    "rungs/parallel/launchers.py": "TPUs, which only Linux has",
    "rungs/parallel/processes.py": "the end of a process in GNU's C++ library",
}


def differences(tree: ast.AST) -> Iterator[str]:
    """Yield what in a module depends on the system."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in DEPENDENT_MODULES)
        elif isinstance(node, ast.ImportFrom):
            if node.module in DEPENDENT_MODULES | ASKED_MODULES:
                yield f"from {node.module}"
        elif isinstance(node, ast.Attribute):
            if ast.unparse(node) in DEPENDENT_NAMES or node.attr in DEPENDENT_METHODS:
                yield ast.unparse(node)
        elif isinstance(node, ast.keyword):
            if node.arg in DEPENDENT_OPTIONS:
                yield node.arg
        elif isinstance(node, ast.Call):
            asks = ast.unparse(node.func) in ("hasattr", "getattr")
            if asks and ast.unparse(node.args[0]) in ASKED_MODULES:
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(KERNEL_FILES):
            yield from [] if id(node) in docstrings else [str(node.value)]


def texts_without_encoding(tree: ast.AST) -> Iterator[str]:
    """Yield the calls that read or write text in the system's own encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(one.arg == "encoding" for one in node.keywords):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        given = [one.value for one in node.args if isinstance(one, ast.Constant)]
        is_text = name in ("open", "fdopen") and {*given} & {"r", "w", "a", "x", "r+", "w+"}
        if (name == "write_text" and len(node.args) < 2) or (name == "read_text" and not node.args):
            is_text = {True}
        if is_text:
            yield ast.unparse(node)


def test_text_files_are_in_utf8_everywhere() -> None:
    calls = [
        (path.name, call)
        for path in SOURCES
        for call in texts_without_encoding(ast.parse(path.read_text("utf-8")))
    ]
    assert calls == []


def test_only_some_modules_depend_on_the_system() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): list(differences(ast.parse(path.read_text("utf-8"))))
        for path in SOURCES
    }
    dependent = {path: names for path, names in found.items() if names}
    assert {path: names for path, names in dependent.items() if path not in ISOLATED} == {}
    assert ISOLATED.keys() - dependent.keys() == set()


@pytest.mark.parametrize(
    "source",
    [
        "import fcntl",
        "def late():\n    import resource",
        "from os import killpg",
        "if sys.platform == 'linux': pass",
        "os.name == 'nt'",
        "path.symlink_to(other)",
        "subprocess.Popen(command, start_new_session=True)",
        "hasattr(os, 'pread')",
        "getattr(signal, 'SIGPROF', 0)",
        "Path('/proc/self/status')",
        "process.send_signal(2)",
    ],
)
def test_differences_are_found(source: str) -> None:
    assert list(differences(ast.parse(source)))
