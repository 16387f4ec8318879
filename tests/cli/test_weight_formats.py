"""`generate.py` with weights in each form, of a model with layers."""

from pathlib import Path

import pytest

from tests.support.commands import run_script
from tests.support.layered_model import write_model
from tests.support.long import long_except

FORMS = {
    "bfloat16": ("--dtype", "bfloat16"),
    "bfloat16 with int8 weights": ("--dtype", "bfloat16", "--weights", "int8"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.mark.parametrize("described", long_except(["bfloat16"], FORMS))
def test_weights_are_used_in_the_form_asked_for(model: Path, described: str) -> None:
    done = run_script("generate.py", model, "ab", "--new-tokens", 4, *FORMS[described])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ab")
    assert f" in {described}, from " in done.stderr
