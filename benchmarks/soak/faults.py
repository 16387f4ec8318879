"""The faults of a soak: what is done to a training process, or to its folder between two starts."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rungs.checkpointing.checkpoint_folder import checkpoint_folders, list_checkpoints
from rungs.run.folder import RunFolder
from tests.faults.injected_faults import AT_THE_START, IN_THE_LOOP
from tests.faults.short_runs import FAULTY_TRAIN
from tests.support.tiny_run import command

KILLED, TERMINATED, INTERRUPTED, FAILED, FINISHED = -signal.SIGKILL, 143, 130, 1, 0
_SECONDS_TO_A_KILL, _SECONDS_BETWEEN_LOOKS = 0.1, 0.001


Damage = Callable[[RunFolder, random.Random], object]


class Fault(NamedTuple):
    """One kind of fault."""

    name: str
    specification: Callable[[random.Random], str] | None
    """What `faulty_train.py` puts into the process; None for a process killed from outside."""
    exit_codes: tuple[int, ...]
    """Which it may end with; 0 where the run was over before the fault came."""
    damage: Damage = lambda *_: None
    """Done to the run folder before the process starts."""


def in_the_process() -> list[Fault]:
    """Kills, signals and full disks, at every moment that there is."""
    killed = [
        Fault(f"SIGKILL {moment}", _at("kill_at", moment, _calls(moment)), (KILLED,))
        for moment in [*AT_THE_START, *IN_THE_LOOP]
    ]
    told = [
        Fault(
            f"{' twice, '.join(signals[:1])}{' twice' * (len(signals) > 1)} {moment}",
            _at("signal_at", moment, (2, 3), *signals),
            (code,),
        )
        for moment in ("after a step is recorded", "in a validation", "before meta.json")
        for signals, code in (
            (("SIGTERM",), TERMINATED),
            (("SIGINT",), INTERRUPTED),
            (("SIGTERM", "SIGTERM"), TERMINATED),
        )
    ]
    full = [
        Fault(
            "disk full in the weights",
            _numbered("fill_disk_in_weights", 2, 3),
            (FAILED,),
        ),
        Fault("files limited", lambda _: "limit_file_size:60000", (FAILED,)),
    ]
    return [*killed, *told, *full]


def on_the_disk() -> list[Fault]:
    """Damage of the newest checkpoint and of what is beside it; the start after it is killed when
    it has saved one more."""
    damages: dict[str, Damage] = {
        "a bit flipped": flip_a_bit,
        "weights cut off": cut_weights,
        "an optimizer file deleted": delete_optimizer_file,
        "meta.json empty": lambda run, _: newest_file(run, "meta.json").write_text(""),
        "meta.json cut off": lambda run, _: cut(newest_file(run, "meta.json")),
        "links pointing nowhere": break_links,
        "links as texts": links_as_texts,
        "a torn line in the metrics": tear_metrics,
        "a lock of the dead": leave_locks,
        "compiled code torn": tear_compiled_code,
        "the folder moved": move_there_and_back,
        "nothing else": lambda *_: None,
    }
    return [
        Fault(f"SIGKILL at random after: {name}", None, (KILLED,), damage)
        for name, damage in damages.items()
    ]


def _calls(moment: str) -> tuple[int, int]:
    """The call to choose: what comes again and again may go well once or twice."""
    return (1, 1) if moment in AT_THE_START else (2, 3)


def _at(function: str, moment: str, counts: tuple[int, int], *rest: str) -> Callable[..., str]:
    return lambda rng: ":".join([function, moment, str(rng.randint(*counts)), *rest])


def _numbered(function: str, low: int, high: int) -> Callable[..., str]:
    return lambda rng: f"{function}:{rng.randint(low, high)}"


def newest_file(run: RunFolder, name: str) -> Path:
    return list_checkpoints(run.checkpoints)[-1].folder / name


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_a_bit(run: RunFolder, rng: random.Random) -> None:
    folder = list_checkpoints(run.checkpoints)[-1].folder
    path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut_weights(run: RunFolder, _: random.Random) -> None:
    cut(newest_file(run, "model.safetensors"))


def delete_optimizer_file(run: RunFolder, rng: random.Random) -> None:
    files = sorted(p for p in newest_file(run, "optimizer").rglob("*") if p.is_file())
    rng.choice(files).unlink()


def break_links(run: RunFolder, _: random.Random) -> None:
    for name in ("best", "latest"):
        (run.checkpoints / name).unlink(missing_ok=True)
        (run.checkpoints / name).symlink_to("20000101Z000000-step-000000")


def links_as_texts(run: RunFolder, _: random.Random) -> None:
    for name in ("best", "latest"):
        link = run.checkpoints / name
        target = link.readlink().name if link.is_symlink() else "gone"
        link.unlink(missing_ok=True)
        link.write_text(target)


def tear_metrics(run: RunFolder, _: random.Random) -> None:
    with run.metrics.open("a") as file:
        file.write('{"global_step": 7, "tokens_')


def leave_locks(run: RunFolder, _: random.Random) -> None:
    for name in ("train.lock", "holder.lock"):
        (run.path / name).write_text("process 1 on another host\n")


def tear_compiled_code(_: RunFolder, rng: random.Random) -> None:
    """Of a cache that is the soak's own."""
    entries = sorted(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).glob("*-cache"))
    for entry in rng.sample(entries, min(3, len(entries))):
        cut(entry)


def move_there_and_back(run: RunFolder, _: random.Random) -> None:
    """A copy that follows links takes the folder's place."""
    copy = run.path.with_name(f"{run.path.name}-copy")
    shutil.copytree(run.path, copy)
    shutil.rmtree(run.path)
    copy.rename(run.path)


def ended_with(fault: Fault, run: RunFolder, datasets: Path, rng: random.Random) -> tuple[int, str]:
    """Start the run with a fault; the exit code, and what was said on the terminal."""
    inside = fault.specification
    python, script, *arguments = command(run, datasets)
    scripts = [str(FAULTY_TRAIN), inside(rng)] if inside else [script]
    before = checkpoint_names(run)
    process = subprocess.Popen([python, *scripts, *arguments], stderr=subprocess.PIPE, text=True)
    while inside is None and process.poll() is None:
        if checkpoint_names(run) - before:
            time.sleep(rng.uniform(0, _SECONDS_TO_A_KILL))
            process.kill()
            break
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    _, said = process.communicate()
    return process.returncode, said


def checkpoint_names(run: RunFolder) -> set[str]:
    return {path.name for path in checkpoint_folders(run.checkpoints)}
