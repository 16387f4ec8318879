"""macOS and Windows, simulated on Linux in programs of their own and what they start.

Rungs' modules see what that system's Python has: no modules and functions that it lacks, its
signals, its `sys.platform`. Files behave as documented for it: on Windows open files can't be
renamed or removed, folders can't be opened, files can be synced only if they are open for writing,
and links are refused. Libraries are those of Linux, so nothing is learned about them.
This file is run by `sitecustomize` at the start of each program, and imports nothing of Rungs."""

import builtins
import enum
import errno
import io
import os
import signal
import stat
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

System = Literal["darwin", "win32"]
SIGBREAK = signal.SIGTTIN
"""Has the number 21, as Windows' SIGBREAK, so that a test can send it."""
FULL_SYNCS = "OTHER_SYSTEM_FULL_SYNCS"
"""Environment variable with a file that gets a line for each F_FULLFSYNC of macOS."""
_NEW_GROUP, _BELOW_NORMAL, _CTRL_BREAK, _FULL_SYNC = 0x200, 0x4000, 1, 51
_OF_LINUX = {
    *("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "fdatasync"),
    *("memfd_create", "eventfd", "copy_file_range", "splice", "O_DIRECT", "O_TMPFILE", "getxattr"),
}
_OF_UNIX = {
    *("fork", "forkpty", "killpg", "getuid", "geteuid", "getgid", "getpgid", "getpgrp", "setsid"),
    *("getsid", "nice", "getpriority", "setpriority", "sysconf", "sysconf_names", "statvfs"),
    *("fstatvfs", "uname", "getloadavg", "mkfifo", "mknod", "openpty", "pread", "pwrite", "readv"),
    *("sendfile", "set_blocking", "get_blocking", "sync", "chown", "fchmod", "fchown", "fchdir"),
    *("lockf", "wait", "wait3", "wait4", "waitid", "WNOHANG", "O_NOFOLLOW", "O_NONBLOCK"),
    *("O_DIRECTORY", "O_CLOEXEC", "O_SYNC", "O_DSYNC", "posix_spawn", "register_at_fork"),
}
_HIDDEN_FUNCTIONS = {"darwin": _OF_LINUX, "win32": _OF_LINUX | _OF_UNIX}
_HIDDEN_MODULES = {
    "darwin": set[str](),
    "win32": {
        *("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "posix", "syslog"),
        *("_posixsubprocess", "readline"),
    },
}


def environment(system: System, folder: Path) -> dict[str, str]:
    """Return an environment whose Python programs run on a simulated system. Writes `folder`."""
    file = str(Path(__file__).resolve())
    (folder / "sitecustomize.py").write_text(
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        f"spec = spec_from_file_location('other_systems', {file!r})\n"
        "module = module_from_spec(spec)\nspec.loader.exec_module(module)\n"
        f"module.become({system!r})\n"
    )
    found = os.environ | {"PYTHONPATH": str(folder)}
    if system == "win32":  # text files in an encoding that isn't UTF-8
        found |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
        found["PYTHONIOENCODING"] = "cp1252"
    return found


def become(system: System) -> None:
    """Simulate a system in this program from now on."""
    known = {
        "os": _Hiding(os, _HIDDEN_FUNCTIONS[system], name="nt" if system == "win32" else "posix"),
        "sys": _Hiding(sys, set(), platform=system),
    }
    if system == "win32":
        windows = {"CREATE_NEW_PROCESS_GROUP": _NEW_GROUP, "Popen": _WindowsProcess}
        windows["BELOW_NORMAL_PRIORITY_CLASS"] = _BELOW_NORMAL
        known |= {"signal": _windows_signals(), "subprocess": _Hiding(subprocess, set(), **windows)}
        _behave_like_windows()
    else:
        known |= {"signal": _Hiding(signal, {"SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT"})}
        known |= {"fcntl": _fcntl_of_macos()}
    _hide_kernel_files()
    _give(known, _HIDDEN_MODULES[system])


class _Hiding(types.ModuleType):
    """A module without some names, and with others."""

    def __init__(self, real: types.ModuleType, hidden: set[str], **own: Any) -> None:
        vars(self).update(__name__=real.__name__, _real=real, _hidden=hidden, **own)

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._real, name, value)


def _give(known: dict[str, _Hiding], hidden: set[str]) -> None:
    """Give Rungs' modules, and programs, these modules, and hide others from them."""
    real = builtins.__import__

    def imported(name: str, globals: Any = None, *rest: Any, **more: Any) -> Any:
        importer = (globals or {}).get("__name__") or ""
        if _is_ours(importer):
            if name in hidden:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in known:
                return known[name]
        return real(name, globals, *rest, **more)

    builtins.__import__ = imported


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("rungs", "__main__")


def _caller() -> str:
    """Return the name of the module that uses a function of this one, maybe by `pathlib`."""
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] in (__name__, "pathlib", "io") and frame.f_back:
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


def _windows_signals() -> _Hiding:
    numbers = {"SIGINT": 2, "SIGILL": 4, "SIGFPE": 8, "SIGSEGV": 11, "SIGTERM": 15, "SIGBREAK": 21}
    numbers |= {"CTRL_C_EVENT": 0, "CTRL_BREAK_EVENT": _CTRL_BREAK, "SIGABRT": 22}
    make: Any = enum.IntEnum
    names = make("Signals", numbers)
    hidden = {name for name in dir(signal) if name.startswith("SIG") and name.isupper()}
    hidden = hidden - {*numbers, "SIG_DFL", "SIG_IGN"} | {"alarm", "setitimer", "ITIMER_PROF"}
    return _Hiding(signal, hidden, Signals=names, **{one.name: one for one in names})


class _WindowsProcess(subprocess.Popen):
    """A process with the options and signals of Windows."""

    def __init__(self, *arguments: Any, creationflags: int = 0, **options: Any) -> None:
        unknown = {"preexec_fn", "start_new_session", "process_group", "pass_fds"} & options.keys()
        assert not unknown, unknown
        own_group = bool(creationflags & _NEW_GROUP)
        super().__init__(*arguments, start_new_session=own_group, **options)

    def send_signal(self, number: int) -> None:
        if number not in (_CTRL_BREAK, signal.SIGTERM):
            raise ValueError(f"Unsupported signal: {number}")
        super().send_signal(SIGBREAK if number == _CTRL_BREAK else signal.SIGKILL)

    def kill(self) -> None:
        self.send_signal(signal.SIGTERM)

    terminate = kill


def _fcntl_of_macos() -> _Hiding:
    import fcntl

    def call(descriptor: int, command: int, *rest: Any) -> Any:
        if command != _FULL_SYNC:
            return fcntl.fcntl(descriptor, command, *rest)
        with open(os.environ.get(FULL_SYNCS, os.devnull), "a") as file:  # noqa: PTH123
            file.write("full\n")
        return os.fsync(descriptor)

    return _Hiding(fcntl, set(), F_FULLFSYNC=_FULL_SYNC, fcntl=call)


_REAL_OPEN, _REAL_STAT, _REAL_READLINK, _REAL_LISTDIR = os.open, os.stat, os.readlink, os.listdir


def _hide_kernel_files() -> None:
    """Let nothing be under /proc and /sys, for Rungs' modules and programs."""

    def hiding(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **more: Any) -> Any:
            text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            if str(text).startswith(("/proc/", "/sys/")) and _is_ours(_caller()):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
            return real(path, *rest, **more)

        return call

    for module, name in ((os, "open"), (os, "stat"), (os, "readlink"), (io, "open")):
        setattr(module, name, hiding(getattr(module, name)))
    builtins.open = io.open


def _behave_like_windows() -> None:
    def replace(source: Any, target: Any, **_: Any) -> None:
        _refuse_open(source)
        if os.path.lexists(target):
            _refuse_open(target)
            if Path(target).is_dir():
                raise PermissionError(errno.EACCES, "Access is denied", str(target))
        real_replace(source, target)

    def rename(source: Any, target: Any, **_: Any) -> None:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "Cannot create an existing file", str(target))
        replace(source, target)

    def unlink(path: Any, **options: Any) -> None:
        assert not options
        if path is not None and os.path.lexists(path):
            _refuse_open(os.fsdecode(path))
        real_unlink(path)

    def open_file(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if Path(os.fsdecode(path)).is_dir() and not _caller().startswith("filelock."):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, flags, *rest, **more)

    def fsync(descriptor: int) -> None:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real_fsync(descriptor)

    def symlink(*_: Any, **__: Any) -> None:
        raise OSError(errno.EINVAL, "A required privilege is not held by the client")

    real_replace, real_unlink, real_open, real_fsync = os.replace, os.unlink, os.open, os.fsync
    changed = {"replace": replace, "rename": rename, "unlink": unlink, "remove": unlink}
    vars(os).update(changed, open=open_file, fsync=fsync, symlink=symlink)


def _refuse_open(path: Any) -> None:
    """Raise PermissionError if a file, or one in a folder, is open in any program. filelock may, as
    it has other code for Windows."""
    if _caller().startswith("filelock."):
        return
    place = os.path.realpath(path)
    status = _REAL_STAT(path, follow_symlinks=False)
    for file in _open_files():
        try:
            found = _REAL_READLINK(file)
            is_it = stat.S_ISREG(status.st_mode) and os.path.samestat(_REAL_STAT(file), status)
        except OSError:
            continue
        if is_it or found.startswith(place + "/"):
            raise PermissionError(errno.EACCES, "used by another process", str(path), 32, found)


def _open_files() -> list[str]:
    files = []
    for process in filter(str.isdigit, _REAL_LISTDIR("/proc")):
        try:
            folder = f"/proc/{process}/fd"
            files += [f"{folder}/{number}" for number in _REAL_LISTDIR(folder)]
        except OSError:  # another user's, or gone
            continue
    return files
