"""The wheel: what is in it, and that it works alone."""

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from rungs.checkpointing.weights_file import WeightsHeader, write_weights
from rungs.config.run_config import config_files
from rungs.step.state import named_arrays
from tests.support.committed_runs import COMMITTED_RUNS, REINFORCEMENT_RUNS
from tests.support.configs import ONE_FILE, model_config
from tests.support.tiny_model import random_model
from tests.support.tiny_run import ROOT

LOAD = """
import sys
import rungs
assert "jax" not in sys.modules, "import rungs is lazy"
import numpy as np
logits = rungs.load_model(sys.argv[1])(np.array([[1, 2, 3]]))
print(rungs.__file__, logits.shape, float(abs(logits).max()) > 0)
"""


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


@pytest.mark.long
def test_the_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    architecture = model_config()
    arrays = {name: np.asarray(array) for name, array in named_arrays(random_model()).items()}
    header = WeightsHeader(architecture, None, "gpt2")
    (tmp_path / "model").mkdir()
    write_weights(tmp_path / "model", arrays, header, ONE_FILE)
    python = tmp_path / "venv" / "bin" / "python"
    run("uv", "venv", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    run("uv", "pip", "install", "--python", python, wheel, cwd=tmp_path)
    printed = run(python, "-c", LOAD, tmp_path / "model", cwd=tmp_path)
    assert printed.startswith(str(tmp_path / "venv"))
    assert printed.strip().endswith("(1, 3, 32) True")
