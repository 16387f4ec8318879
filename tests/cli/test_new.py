"""Run folders made from what comes with Rungs, in any folder, without a checkout."""

import json
from pathlib import Path

import pytest

from tests.support.committed_runs import ROOT
from tests.support.installed import install, run_rungs


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return install(tmp_path)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "anywhere"
    folder.mkdir()
    return folder


def keys_of(path: Path) -> dict[str, object]:
    keys: dict[str, object] = json.loads(path.read_text())
    return keys


@pytest.mark.parametrize("like", ["layers", "runs/layers"])
def test_a_run_that_comes_with_rungs_is_copied(like: str, site: Path, here: Path) -> None:
    made = run_rungs(site, "new", "mine", "--like", like, "--set", "seed=7", cwd=here)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout == "runs/mine: made; to train it: rungs train mine\n"
    for name in ("model.json", "train.json"):
        keys = keys_of(here / "runs" / "mine" / name)
        schema = here / "runs" / "mine" / str(keys.pop("$schema"))
        assert schema.resolve().is_relative_to(here), "the same in every environment"
        assert keys_of(schema) == keys_of(ROOT / "schemas" / f"{name[:-5]}.schema.json")
        added = {"seed": 7, "lineage": {"like": "layers", "set": {"seed": 7}}}
        expected = keys_of(ROOT / "runs" / "layers" / name) | (added if name[0] == "t" else {})
        assert keys == {key: value for key, value in expected.items() if key != "$schema"}


def test_a_copy_may_have_the_name_of_the_original(site: Path, here: Path) -> None:
    for _ in range(2):  # as when the same `rungs train layers --like layers` resumes
        made = run_rungs(site, "new", "layers", "--like", "layers", cwd=here)
        assert (made.returncode, made.stderr) == (0, "")
    assert keys_of(here / "runs/layers/train.json")["lineage"] == {"like": "layers", "set": {}}


def test_messages_name_the_commands_of_an_installation(site: Path, here: Path) -> None:
    found = run_rungs(site, "train", "layers", cwd=here).stderr
    assert found.endswith("it comes with Rungs; make one: rungs new layers --like layers\n")
    run_rungs(site, "new", "mine", "--like", "layers", cwd=here)
    found = run_rungs(site, "checkpointing", "mine", cwd=here).stderr
    assert found == "error: runs/mine: no checkpoint yet; train it: rungs train mine\n"


def test_without_an_origin_the_runs_that_come_with_rungs_are_listed(site: Path, here: Path) -> None:
    ended = run_rungs(site, "new", "mine", cwd=here)
    assert ended.returncode == 2
    assert "come with Rungs: a-to-a, a-to-a-fineweb, attention," in ended.stderr
    assert not [*here.iterdir()]
