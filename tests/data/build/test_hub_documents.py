"""Documents on the hub, downloaded and tokenized, against a local server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rungs.common.errors import UserError
from rungs.common.hub import dataset_repository
from rungs.data.build.document_files import Choice, hub_files
from rungs.data.tokens.dataset import Dataset
from tests.support.commands import Finished, run_script
from tests.support.committed_runs import ROOT
from tests.support.document_files import compressed, json_lines, parquet, texts
from tests.support.hub_stand_in import DATASET, HubStandIn
from tests.support.local_server import use_server

CARD = {
    "license": "cc-by-4.0",
    "configs": [
        {
            "config_name": "small",
            "data_files": [
                {"split": "train", "path": "data/train-*"},
                {"split": "validation", "path": "data/validation-*"},
            ],
        }
    ],
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with HubStandIn() as stand_in:
        stand_in.files["README.md"], stand_in.card = b"read me", CARD
        for part in range(5):
            stand_in.files[f"data/train-{part}.parquet"] = parquet(text=texts(30, part))
        stand_in.files["data/validation-0.parquet"] = parquet(text=texts(9, 9))
        stand_in.files["more.jsonl.gz"] = compressed(json_lines({"text": "more"}), "gzip")
        use_server(stand_in.address, monkeypatch)
        yield stand_in


def arguments_for(folder: Path) -> list[object]:
    return [DATASET, "--vocab-size", 300, "--datasets-dir", folder]


def download(folder: Path, *arguments: object) -> Finished:
    return run_script("download_dataset.py", *arguments_for(folder), *arguments)


def test_text_on_the_hub_becomes_a_dataset(hub: HubStandIn, tmp_path: Path) -> None:
    finished = download(tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "159 documents in 6 files" in finished.stdout
    assert "license: cc-by-4.0" in finished.stdout
    dataset = Dataset(DATASET, tmp_path / "owner" / "data")
    assert dataset.splits == ("train", "validation")
    source = dataset.description.source
    assert (source.kind, source.revision) == ("documents", hub.revision)
    assert source.documents is not None
    assert [file.documents for file in source.documents.files] == [*[30] * 5, 9]
    assert not [path for path in dataset.folder.iterdir() if path.name.startswith(".")]


def test_options_choose_files(hub: HubStandIn, tmp_path: Path) -> None:
    finished = download(tmp_path, "--files", "more*", "--name", "more", "--validation-percent", 0)
    assert finished.returncode == 0, finished.stderr
    assert "1 document in 1 file" in finished.stdout
    assert hub.downloads() == ["more.jsonl.gz"]


def test_a_download_that_broke_off_goes_on(hub: HubStandIn, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("straight", "broken")]
    assert download(folders[0]).returncode == 0
    missing = hub.files.pop("data/train-3.parquet")
    hub.listed = {**hub.files, "data/train-3.parquet": missing}
    finished = download(folders[1])
    assert finished.returncode == 2
    assert "data/train-3.parquet" in finished.stderr
    hub.files["data/train-3.parquet"] = missing
    hub.downloads()
    assert download(folders[1]).returncode == 0
    assert "train-0.parquet" not in hub.downloads()
    for path in (folders[0] / DATASET).iterdir():
        assert (folders[1] / DATASET / path.name).read_bytes() == path.read_bytes()


@pytest.mark.long
def test_a_download_killed_twice_equals_one_that_ran_straight_through(
    hub: HubStandIn, tmp_path: Path
) -> None:
    assert download(tmp_path / "straight").returncode == 0
    for file in ("train-1.parquet", "train-3.parquet"):
        hub.stalls_from = file
        hub.is_stalled.clear()
        command = "download_dataset.py", *map(str, arguments_for(tmp_path / "killed"))
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert hub.is_stalled.wait(60)
        process.kill()
        process.wait()
        assert not (tmp_path / "killed" / "owner" / "data").exists()
    hub.stalls_from = None
    hub.requests.clear()
    assert download(tmp_path / "killed").returncode == 0
    assert "train-0.parquet" not in hub.downloads()
    straight, killed = (tmp_path / name / "owner" / "data" for name in ("straight", "killed"))
    assert {path.name for path in killed.iterdir()} == {path.name for path in straight.iterdir()}
    for path in straight.iterdir():
        assert (killed / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_file_that_is_not_the_one_on_the_hub_is_refused(hub: HubStandIn, tmp_path: Path) -> None:
    hub.listed = {**hub.files, "data/train-0.parquet": b"something else"}
    finished = download(tmp_path)
    assert finished.returncode == 2
    assert "data/train-0.parquet: was not downloaded correctly" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text-column", "story"], '"story" is not there; columns with text: text'),
        (["--config", "big"], 'owner/data: no configuration "big"; there are small'),
        (["--split", "test"], 'owner/data: no split "test"; there are train, validation'),
        (["--files", "x*"], "owner/data: no file matches --files x*"),
    ],
)
def test_choices_that_are_not_there_are_refused(
    hub: HubStandIn, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert hub.files
    finished = download(tmp_path, *arguments)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 1
    assert not (tmp_path / DATASET).exists()


FILE = {"rfilename": "a.parquet", "size": 3}


@pytest.mark.parametrize(
    "configs",
    [
        3,
        [{"data_files": [{"path": "a*"}]}],
    ],
)
def test_a_card_of_another_form_is_one_line(configs: Any, hub: HubStandIn) -> None:
    hub.card = {"license": 3, "configs": configs}
    with pytest.raises(UserError, match=f"^{DATASET}: the configurations in its card have an unkn"):
        hub_files(DATASET, dataset_repository(DATASET), Choice())
    choice = Choice(patterns=("more*",))
    hub_files(DATASET, dataset_repository(DATASET), choice)


def test_a_gated_repository_says_where_to_ask(hub: HubStandIn, tmp_path: Path) -> None:
    hub.error = "GatedRepo"
    finished = download(tmp_path)
    assert finished.returncode == 2
    assert "ask on https://huggingface.co/datasets/owner/data" in finished.stderr
