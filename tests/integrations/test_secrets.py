"""Secrets of the command line and the environment are in nothing that a run prints or writes."""

import os
from pathlib import Path

import pytest

from tests.support.tiny_run import make_dataset, make_run, train

SECRET = "planted"
ENVIRONMENT = {
    "HF_TOKEN": f"hf_{SECRET}",
    "MLFLOW_TRACKING_URI": f"http://user:{SECRET}@127.0.0.1:1",
    "HTTPS_PROXY": f"http://user:{SECRET}@127.0.0.1:1",
}
OPTIONS = (
    *("--on-event", f"https://user:{SECRET}@127.0.0.1:1/hook"),
    *("--on-event", f"false --header {SECRET}"),
)
MIRROR = ("--mirror", f"ftp://user:{SECRET}@127.0.0.1:1/runs")


@pytest.mark.long
def test_no_secret_is_printed_or_written(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run")
    variables = os.environ | ENVIRONMENT
    starts = [
        train(run, tmp_path / "datasets", *options, env=variables)
        for options in ((*OPTIONS, *MIRROR), OPTIONS, (*OPTIONS, *MIRROR))
    ]
    # a mirror that can't be reached may have checkpoints; once there are some here, it need not
    assert [ended.returncode for ended in starts] == [1, 0, 0]
    printed = "".join(ended.stdout + ended.stderr for ended in starts)
    for said in ("--on-event https://127.0.0.1:1: ", "--on-event false: ", "ftp://***@127.0.0.1:1"):
        assert said in printed
    assert SECRET not in printed
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert run.log in files
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
