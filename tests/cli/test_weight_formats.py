"""`generate.py` with weights in each form, as a user starts it: a process, and a model with
layers."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.committed_runs import ROOT
from tests.support.layered_model import write_model
from tests.support.long import long_except

FORMS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "float32 with int8 weights": ("--weights", "int8"),
    "bfloat16 with int8 weights": ("--dtype", "bfloat16", "--weights", "int8"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.mark.parametrize("described", long_except(["bfloat16"], FORMS))
def test_weights_are_used_in_the_form_asked_for(model: Path, described: str) -> None:
    command = [sys.executable, str(ROOT / "generate.py"), str(model), "ab", "--new-tokens", "4"]
    done = subprocess.run(
        [*command, *FORMS[described]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ab")
    assert f" in {described}, from " in done.stderr
