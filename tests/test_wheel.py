"""What is in the wheel; `.ci/wheel` trains with it alone."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from rungs.config.run_config import config_files
from tests.support.committed_runs import COMMITTED_RUNS, REINFORCEMENT_RUNS
from tests.support.tiny_run import ROOT


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run("uv", "build", "--wheel", "--out-dir", folder, cwd=ROOT)
    return next(folder.glob("rungs_lm-*.whl"))


@pytest.mark.long
def test_the_wheel_holds_the_package_committed_runs_and_schemas(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = (path for path in (ROOT / "rungs").rglob("*") if "__pycache__" not in path.parts)
    expected = {path.relative_to(ROOT).as_posix() for path in package if path.is_file()}
    configs = [run / name for run in COMMITTED_RUNS for name in ("model.json", "train.json")]
    configs += [run / name for run in REINFORCEMENT_RUNS for name in config_files(run)]
    own_code = [file for run in REINFORCEMENT_RUNS for file in run.glob("*.py")]
    others = [*configs, *own_code, *(ROOT / "schemas").iterdir()]
    expected |= {f"rungs/shipped/{path.relative_to(ROOT).as_posix()}" for path in others}
    own = {name for name in names if name.startswith("rungs/shipped/runs/")} - expected
    assert names - own == expected, "all but runs of the user, whose checkpoints must not be in it"
    assert all(name.endswith(".json") for name in own)
