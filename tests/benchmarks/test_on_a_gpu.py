"""Sessions of `benchmarks/on_a_gpu.py`: in time, continued, and what they write."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import gpu_tables
from benchmarks.gpu_parts import needs
from benchmarks.gpu_parts import session as gpu_session
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.parts import Part
from benchmarks.gpu_parts.results import Results
from benchmarks.gpu_parts.session import measure
from benchmarks.gpu_parts.setting import ROOT, Setting
from benchmarks.gpu_parts.step_variants import (
    COMMITTED,
    VARIANTS,
    compiler_options,
    config_of,
    parse_variant,
)
from benchmarks.on_a_gpu import choose
from rungs.common.errors import UserError

SETTING = Setting(rehearse=True, torch=None, variants=[])
FULL = SETTING._replace(rehearse=False)
FAKE = Part("tests.support.gpu_part", "what a test needs", 1, 1)
COMMAND = [sys.executable, str(ROOT / "benchmarks/on_a_gpu.py"), "--rehearse"]


def session(path: Path, seconds: float = 60, **parts: Part) -> dict[str, Any]:
    """Measure fake parts; return what the file says of each."""
    results = Results.open(path, rehearse=True, fresh=False)
    measure(results, parts or {"one": FAKE}, SETTING, time.monotonic() + seconds)
    content: dict[str, Any] = json.loads(path.read_text())["parts"]
    return content


def test_figures_and_a_table_are_written(tmp_path: Path) -> None:
    part = session(tmp_path / "a.json")["one"]
    assert part["state"] == "done"
    assert part["figures"][0] == {
        "name": "first",
        "values": [1.0, 3.0, 2.0],
        "unit": "s",
        "note": "a note",
        "problem": "",
    }
    lines = (tmp_path / "a.txt").read_text().splitlines()
    assert lines[-2].split() == ["first", "2.00", "(1.00", "to", "3.00)", "s", "a", "note"]
    assert lines[-1].split() == ["second", "5.00", "ms"]


def test_a_part_that_fails_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PART_FAILS", "1")
    parts = session(tmp_path / "a.json", one=FAKE, two=FAKE)
    assert [part["state"] for part in parts.values()] == ["failed", "failed"]
    assert parts["one"]["why"] == "RuntimeError: out of order"
    assert [figure["name"] for figure in parts["one"]["figures"]] == ["first"]
    results = Results.open(tmp_path / "a.json", rehearse=True, fresh=False)
    assert results.problems == [f"{it}: failed: RuntimeError: out of order" for it in parts]
    monkeypatch.delenv("PART_FAILS")
    again = session(tmp_path / "a.json", one=FAKE)
    assert again["one"]["state"] == "done"
    assert again["two"]["state"] == "failed"


@pytest.mark.long
def test_a_session_stops_in_time_with_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("PART_WAITS", str(pids))
    path = tmp_path / "a.json"
    part = session(path, seconds=7, one=FAKE)["one"]
    assert part["state"] == "stopped"
    assert len(part["figures"]) == 1
    wait_until_ended(*map(int, pids.read_text().split()))
    # it is now known to take 5 s and more; what it had stays
    again = session(path, seconds=5, one=FAKE)["one"]
    assert (again["state"], len(again["figures"])) == ("stopped", 1)
    assert again["seconds"] == part["seconds"]


@pytest.mark.long
def test_a_part_that_hangs_leaves_time_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_session, "LEAST_PATIENCE_SECONDS", 3.0)
    monkeypatch.setattr(gpu_session, "REHEARSAL_PATIENCE", 0.0)
    monkeypatch.setenv("PART_WAITS", str(tmp_path / "pids"))
    assert session(tmp_path / "a.json")["one"]["state"] == "stopped"


def test_a_figure_that_is_not_finite_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PART_VALUE", "inf")
    part = session(tmp_path / "a.json")["one"]
    assert part["state"] == "done"
    assert part["figures"][0]["problem"] == "not finite: 1, inf"
    problems = Results(tmp_path / "a.json", json.loads((tmp_path / "a.json").read_text())).problems
    assert problems == ["one, first: not finite: 1, inf"]
    assert "Infinity" not in (tmp_path / "a.json").read_text()


def test_what_was_never_tried_comes_first_and_what_failed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PART_FAILS", "1")
    session(tmp_path / "a.json", one=FAKE)
    monkeypatch.delenv("PART_FAILS")
    results = Results.open(tmp_path / "a.json", rehearse=True, fresh=False)
    assert sorted(["one", "new"], key=results.tries) == ["new", "one"]


def test_what_the_autotuner_chose_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "written.txt"
    monkeypatch.setattr(gpu_session, "AUTOTUNED", written)
    part = FAKE._replace(module="tests.support.step")
    gpu_session._keep_autotuned(tmp_path / "nothing.txt")
    kept = tmp_path / f"a.{part.name}.autotuned.txt"
    for text, expected in (("many choices", "many choices"), ("few", "many choices")):
        written.write_text(text)
        gpu_session._keep_autotuned(kept)
        assert kept.read_text() == expected
        assert not written.exists()


def test_what_does_not_fit_is_skipped_and_what_is_done_is_kept(tmp_path: Path) -> None:
    path, long = tmp_path / "a.json", FAKE._replace(rehearsal_seconds=100)
    parts = session(path, long=long, short=FAKE)
    assert parts["long"]["state"] == "skipped"
    assert "needs about 100 s" in parts["long"]["why"]
    assert parts["short"]["state"] == "done"
    before = parts["short"]
    assert session(path, seconds=0, long=long, short=FAKE)["short"] == before


def test_a_killed_session_keeps_what_it_has_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pids = tmp_path / "a.json", tmp_path / "pids"
    code = f"""
from pathlib import Path
from tests.benchmarks.test_on_a_gpu import session
session(Path({str(path)!r}))
"""
    environment = {**os.environ, "PART_WAITS": str(pids), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until_ended(*map(int, pids.read_text().split()))
    killed = json.loads(path.read_text())["parts"]["one"]
    assert (killed["state"], len(killed["figures"])) == ("measuring", 1)
    monkeypatch.delenv("PART_WAITS", raising=False)
    resumed = session(path)["one"]
    assert (resumed["state"], len(resumed["figures"])) == ("done", 2)


def wait_until_ended(*pids: int) -> None:
    """Wait until processes have ended; zombies have."""
    for pid in pids:
        for _ in range(300):
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                break
            if state == "Z":
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"process {pid} still runs")


def test_a_file_of_other_code_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    session(path)
    content = json.loads(path.read_text())
    content["measured"]["code"] = "another"
    path.write_text(json.dumps(content))
    with pytest.raises(click.UsageError, match="other code; choose another --into, or --fresh"):
        Results.open(path, rehearse=True, fresh=False)
    assert not Results.open(path, rehearse=True, fresh=True).is_done("one")
    path.write_text("{}")
    with pytest.raises(click.UsageError, match="not a file that on_a_gpu"):
        Results.open(path, rehearse=True, fresh=False)


def test_a_finished_rehearsal_begins_again_and_an_unfinished_one_goes_on(tmp_path: Path) -> None:
    path, long = tmp_path / "a.json", FAKE._replace(rehearsal_seconds=100)
    session(path, one=FAKE, two=long)
    assert Results.open(path, rehearse=True, fresh=False).is_done("one")
    session(path, two=FAKE)
    assert not Results.open(path, rehearse=True, fresh=False).is_done("one")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "nonsense"], "--variant nonsense: not one of runs/gpt2-small"),
        (["--variant", "rmat=none"], "unknown key"),
        (["--variant", "remat=bad"], "remat"),
        (["--only", "nothing"], "'nothing' is not one of"),
        (["--torch-python", "/nowhere"], "has no PyTorch"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    into = ["--into", str(tmp_path / "a.json")]
    done = subprocess.run([*COMMAND, *into, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [*COMMAND[:2], "--without-torch"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "nvidia-smi failed; --rehearse runs on a CPU" in done.stderr


def test_needs_are_listed_with_versions() -> None:
    done = subprocess.run([*COMMAND, "--needs"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    names = {line.partition("==")[0] for line in lines}
    assert all("==" in line for line in lines)
    assert {"click", "grain", "pydantic-core", "safetensors"} < names <= {*needs.NEEDS}


def test_what_is_missing_is_listed_with_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "NEEDS", ("pydantic", "no-such-thing"))
    monkeypatch.setattr(needs, "_version", lambda _: None)
    assert [line.partition(">")[0] for line in needs.requirements()] == ["pydantic"]
    assert needs.requirements()[0].endswith("  # not installed")
    assert needs.missing() == ["jax", "flax", "optax", "orbax-checkpoint", "pydantic"]


def test_what_nothing_that_is_installed_requires_is_not_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(needs, "NEEDS", ("pydantic-core", "no-such-thing"))
    installed = needs._version
    absent = {"pydantic-core", "no-such-thing"}
    monkeypatch.setattr(needs, "_version", lambda name: None if name in absent else installed(name))
    monkeypatch.setattr(needs, "GIVEN", ("pydantic",))
    assert needs.missing() == ["pydantic-core"]


def test_every_variant_is_a_valid_run_of_as_many_tokens() -> None:
    for name in VARIANTS:
        run = config_of(parse_variant(name)[1], FULL)
        assert run.tokens_per_step == 96 * 1024
        assert config_of(parse_variant(name)[1], SETTING).tokens_per_step == 12 * 64
    assert config_of({}, FULL).train.microbatch_size == 96


def test_variants_change_keys_and_flags(tmp_path: Path) -> None:
    checkout, changes = parse_variant("remat=none,xla_gpu_enable_cublaslt=true")
    assert checkout == ROOT
    assert config_of(changes, FULL).train.remat == "none"
    assert compiler_options(changes) == {"xla_gpu_enable_cublaslt": True}
    (tmp_path / "rungs").mkdir()
    (tmp_path / "rungs/__init__.py").touch()
    assert parse_variant(str(tmp_path)) == (tmp_path, {})
    assert parse_variant(f"{tmp_path},remat=none") == (tmp_path, {"remat": "none"})
    with pytest.raises(UserError, match="microbatch_size"):
        config_of({"microbatch_size": 0.5}, FULL)


def test_figures_have_three_digits_or_more() -> None:
    texts = {0.004213: "0.00421", 2.5e-6: "2.5e-06", 12.345: "12.3", 423_900.4: "423,900", 0.0: "0"}
    for value, text in texts.items():
        assert Figure("", [value]).as_text() == text
    assert Figure("", [1.0, 2.0], "s").as_text() == "1.50 (1.00 to 2.00) s"


def test_tables_go_into_the_page(tmp_path: Path) -> None:
    path, page = tmp_path / "h200.json", tmp_path / "page.md"
    session(path)
    content = json.loads(path.read_text())
    page.write_text(f"before\n{gpu_tables.BEGIN}\nold\n{gpu_tables.END}\nafter\n")
    assert tables(path, page) == 2  # of a rehearsal
    content |= {"rehearsal": False, "parts": {"step": content["parts"]["one"]}}
    content["measured"]["device"] = "NVIDIA H200, 143771 MiB, driver 580"
    path.write_text(json.dumps(content))
    assert tables(path, page) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert f"### NVIDIA H200, {content['begun']}" in text
    assert "| first | 2.00 (1.00 to 3.00) s | a note |" in text


def tables(path: Path, page: Path) -> int:
    script = ROOT / "benchmarks/gpu_tables.py"
    command = [sys.executable, str(script), str(path), "--page", str(page)]
    return subprocess.run(command, capture_output=True).returncode


def test_the_page_has_a_place_for_tables() -> None:
    text = gpu_tables.PAGE.read_text(encoding="utf-8")
    assert text.index(gpu_tables.BEGIN) < text.index(gpu_tables.END)


@pytest.mark.long
def test_another_checkout_is_a_variant_in_the_same_process(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name in ("rungs", COMMITTED):
        shutil.copytree(ROOT / name, other / name)
    changed = other / "rungs/checks/device_step.py"
    text = changed.read_text()
    old = "return needed_bytes(self.compiled.compiled, target_device.platform())"
    assert old in text
    changed.write_text(text.replace(old, "return 12_345_000_000"))
    into = ["--into", str(tmp_path / "a.json"), "--variant", str(other)]
    done = subprocess.run([*COMMAND, *into], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = json.loads((tmp_path / "a.json").read_text())["parts"].values()
    found = {one["name"]: one["values"] for one in part["figures"]}
    assert found[f"{other}: memory, as compiled"] == [12.345]
    assert found[f"{COMMITTED}: memory, as compiled"] != [12.345]


def test_the_race_needs_its_dataset() -> None:
    assert "race" not in choose((), (), can_race=False)
    assert list(choose(("race",), (), can_race=True)) == ["race"]
    with pytest.raises(click.UsageError, match="name the folder of its dataset with --race"):
        choose(("race",), (), can_race=False)
