"""Run folders copied from another with keys changed."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.config import run_config
from rungs.run import derive
from tests.support.tiny_reinforcement import make_reinforcement_run
from tests.support.tiny_run import MODEL, TRAIN, make_run


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/old"), lineage=None)
    for name in ("model.json", "train.json"):
        path = Path("runs/old") / name
        path.write_text(json.dumps({"$schema": f"../../{name}", **json.loads(path.read_text())}))
    return tmp_path


def create_like(name: str, like: str, settings: Sequence[str]) -> Path:
    with derive.create_like(name, like, settings) as folder:
        return folder


def read(name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads(Path(name).read_text())
    return content


def test_a_copy_has_the_old_keys_the_changes_and_its_lineage() -> None:
    assert create_like("new", "old", ["learning_rate=3e-4", "n_layers=1"]) == Path("runs/new")
    assert read("runs/new/model.json") == {**MODEL, "n_layers": 1, "$schema": "../../model.json"}
    expected = {**TRAIN, "learning_rate": 3e-4, "$schema": "../../train.json"}
    lineage = {"like": "runs/old", "set": {"learning_rate": 3e-4, "n_layers": 1}}
    assert read("runs/new/train.json") == {**expected, "lineage": lineage}
    assert run_config.load_run("runs/new").train.learning_rate == 3e-4


def test_values_may_be_strings_lists_or_null() -> None:
    create_like("new", "old", ["dataset=my-text", "clipping_max_norm=null", 'sharding={"data": 1}'])
    train = run_config.load_run("runs/new").train
    assert (train.dataset, train.clipping_max_norm) == ("my-text", None)
    assert train.sharding is not None
    assert train.sharding.data == 1


def test_the_schema_path_is_adjusted_to_another_depth() -> None:
    create_like("elsewhere/deep/new", "old", [])
    assert read("elsewhere/deep/new/model.json")["$schema"] == "../../../model.json"


@pytest.mark.parametrize("schema", [None, "https://example.org/model.json"])
def test_a_schema_that_is_not_a_relative_path_is_unchanged(schema: str | None) -> None:
    path = Path("runs/old/model.json")
    path.write_text(json.dumps({**MODEL, "$schema": schema}))
    create_like("new", "old", [])
    assert read("runs/new/model.json")["$schema"] == schema
    assert sorted(path.name for path in Path("runs").iterdir()) == ["new", "old"]


def test_a_folder_that_cannot_be_written_is_reported() -> None:
    Path("file").write_text("")
    with pytest.raises(UserError, match="file/new: cannot be written"):
        create_like("file/new", "old", [])


def test_the_same_command_reuses_the_copy_and_another_is_rejected() -> None:
    settings = ["learning_rate=3e-4"]
    assert create_like("new", "old", settings) == create_like("new", "old", settings)
    train = Path("runs/new/train.json")
    train.write_text(json.dumps(dict(reversed(json.loads(train.read_text()).items()))))
    create_like("new", "old", settings)
    with pytest.raises(UserError, match="already exists with other keys"):
        create_like("new", "old", ["learning_rate=4e-4"])


def test_a_copy_with_1_in_the_place_of_true_is_another() -> None:
    create_like("new", "old", ["shuffle=true"])
    train = Path("runs/new/train.json")
    train.write_text(train.read_text().replace('"shuffle": true', '"shuffle": 1'))
    with pytest.raises(UserError, match="already exists with other keys"):
        create_like("new", "old", ["shuffle=true"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["learning_rat=1"], r"learning_rat: unknown key .*did you mean learning_rate\?"),
        (["learning_rate=fast"], 'learning_rate: "fast" is not allowed'),
        (["learning_rate"], "must have the form key=value"),
        (["lineage=x"], "--set lineage: a copy gets its own"),
        (["learning_rate=1", "learning_rate=1"], "--set learning_rate: given more than once"),
        (['dataset={"a": 1, "a": 2}'], "--set dataset=.*: a: given more than once; keep one"),
        (["n_heads=3"], "n_heads: 3 does not divide emb_dim 32"),
    ],
)
def test_bad_settings_are_reported_and_nothing_is_written(
    settings: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        create_like("new", "old", settings)
    assert not Path("runs/new").exists()


def fail_in_copy(settings: Sequence[str], writes: str = "") -> None:
    """Fail to start a new copy that has written a file."""
    with derive.create_like("new", "old", settings) as folder:
        if writes:
            (folder / writes).write_text("")
        raise UserError("vocab_size: too small")


def test_a_copy_that_cannot_start_is_removed_but_not_one_that_was_there_before() -> None:
    with pytest.raises(UserError, match="too small"):
        fail_in_copy(["vocab_size=9"])
    assert not Path("runs/new").exists()
    create_like("new", "old", ["vocab_size=9"])
    with pytest.raises(UserError, match="too small"):
        fail_in_copy(["vocab_size=9"])
    assert Path("runs/new/train.json").exists()


def test_a_copy_with_results_is_never_removed() -> None:
    with pytest.raises(UserError, match="too small"):
        fail_in_copy([], writes="metrics.jsonl")
    assert len(list(Path("runs/new").iterdir())) == 3


def test_the_files_of_tasks_are_copied(project: Path) -> None:
    old = make_reinforcement_run(project / "runs" / "rl", Path("runs/old"))
    changes = {"source": "items/train.jsonl", "verifier": "reward.py"}
    content = json.loads((old.path / "reinforce.json").read_text())
    content["tasks"] = [{**changes, "validation_source": "/elsewhere/held-out.jsonl"}]
    (old.path / "reinforce.json").write_text(json.dumps(content))
    (old.path / "items").mkdir()
    (old.path / "items" / "train.jsonl").write_text("{}\n")
    (old.path / "reward.py").write_text("# mine\n")
    (old.path / "train.log").write_text("not copied\n")
    new = create_like("new", "rl", ["steps=3"])
    files = {path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file()}
    assert files == {"model.json", "reinforce.json", "items/train.jsonl", "reward.py"}
    assert (new / "reward.py").read_text() == "# mine\n"
    with (
        pytest.raises(UserError, match="later"),
        derive.create_like("other", "rl", []) as folder,
    ):
        raise UserError("later")
    assert not folder.exists()
