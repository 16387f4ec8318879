"""Mirrors in S3 and in Google Cloud Storage, through local servers that stand for them.

Needs the extras `s3` and `gs`, moto and gcp-storage-emulator; `.ci/run` says how to get them.
"""

import importlib.util
import shutil
from collections.abc import Iterator

import pytest

from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.integrations.mirror_folder import MirrorFolder
from rungs.integrations.mirroring import Copier, restore_if_empty
from rungs.run.folder import RunFolder
from tests.support.mirrors import files_of, save

PACKAGES = {
    "s3://runs/a": ("s3fs", "moto"),
    "gs://runs/a": ("gcsfs", "gcp_storage_emulator"),
}


@pytest.fixture(params=PACKAGES)
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder in a bucket."""
    for package in PACKAGES[request.param]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}; `.ci/run` has the command")
    start = _s3 if request.param.startswith("s3") else _google_cloud_storage
    yield from (request.param for _ in start(monkeypatch))


def _s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anything")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    boto3.client("s3").create_bucket(Bucket="runs")
    yield
    server.stop()


def _google_cloud_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 9027, in_memory=True, default_bucket="runs")
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9027")
    yield
    server.stop()


def test_a_run_is_mirrored_in_a_bucket_and_restored(url: str, run: RunFolder) -> None:
    save(run, 3)
    assert MirrorFolder(url).names() == []
    Copier(run, MirrorFolder(url), keep=-1).copy(everything=True)
    checkpoint_folder.delete_old(run.checkpoints, keep=1)
    Copier(run, MirrorFolder(url), keep=1).copy(everything=True)
    first, third = (checkpoint.folder for checkpoint in list_checkpoints(run.checkpoints))
    assert MirrorFolder(url).checkpoints() == [first.name, third.name]
    expected = files_of(run.path)
    shutil.rmtree(run.path)
    restore_if_empty(run, url, lambda _: None)
    assert files_of(run.path) == expected
    aside = run.aside / "then" / "checkpoints"
    aside.mkdir(parents=True)
    third.rename(aside / third.name)
    fourth = save(run, 4)
    Copier(run, MirrorFolder(url), keep=-1).copy(everything=True)
    mirror = MirrorFolder(url)
    assert mirror.checkpoints() == [first.name, fourth.name]
    assert f"aside/{third.name}/meta.json" in mirror.files()
    assert mirror.read("nothing.json") is None
