"""A step that needs more memory than there is."""

import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.faults.short_runs import train_with_fault
from tests.support.tiny_run import make_dataset, make_run


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_error_says_where_the_memory_goes_and_which_edits_would_fit(tmp_path: Path) -> None:
    datasets = tmp_path / "datasets"
    make_dataset(datasets)
    tokens = datasets / "tiny" / "train.safetensors"
    save_file({"tokens": np.tile(load_file(tokens)["tokens"], 7)}, tokens)
    large = {"microbatch_size": 8192, "gradient_accumulation_steps": 1, "min_train_tokens": 131_072}
    run = make_run(tmp_path / "run", sharding={"data": 1}, **large)
    ended = train_with_fault("limit_memory_of_steps:400", run, datasets)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "this run needs more memory than there is" in ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert errors[0] == "error: out of memory"
    assert errors[1].startswith("error: a step needs about ")
    assert errors[1].endswith(" on one device with 900.0 MB:")
    labels = [line.removeprefix("error: ").rsplit(maxsplit=2)[0].strip() for line in errors[2:9]]
    assert labels == [
        *("weights", "moments", "gradients", "gradient sum", "all-gathered", "activations"),
        "temporary",
    ]
    edit = '"microbatch_size": 4096, "gradient_accumulation_steps": 2'
    assert any(edit in line for line in errors)
    assert "out of memory" in run.log.read_text()
