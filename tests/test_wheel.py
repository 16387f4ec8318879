"""What is in the wheel; `.ci/wheel` trains with it alone."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from rungs.config.run_config import config_files
from tests.support.committed_runs import COMMITTED_RUNS, REINFORCEMENT_RUNS
from tests.support.tiny_run import ROOT


@pytest.mark.long
def test_it_holds_the_package_committed_runs_and_schemas(tmp_path: Path) -> None:
    build = ["uv", "build", "--quiet", "--wheel", "--out-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("rungs_lm-*.whl")
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
