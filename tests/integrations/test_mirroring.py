"""Training with a mirror: it costs no step, and a lost machine loses only the steps since."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.config.run_config import load_run
from rungs.integrations.mirroring import Mirroring, restore_if_empty
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support.mirrors import Failing, files_of, save
from tests.support.tiny_reinforcement import (
    make_reinforcement_run,
    reinforce,
    steps_of,
    write_start,
)
from tests.support.tiny_run import (
    assert_same_outcome,
    command,
    final_arrays,
    make_dataset,
    make_run,
    train,
)


@pytest.fixture
def datasets_dir(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "datasets")
    return tmp_path / "datasets"


def steps_in(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder / "checkpoints")]


def test_what_a_failing_mirror_lacks_is_copied_when_it_can_be_reached_again(
    run: RunFolder, failing: str, mirror: Path, messages: pytest.LogCaptureFixture
) -> None:
    Failing.left = 3
    with Mirroring(run, failing, keep=-1) as mirroring:
        mirroring.request()
        wait_for("no route to host; trying again in 0 s", messages)
        Failing.left = 10**9
        wait_for("reached again; up to date", messages)
    assert files_of(mirror) == files_of(run.path)


def wait_for(message: str, messages: pytest.LogCaptureFixture) -> None:
    until = time.monotonic() + 60
    while message not in messages.text:
        assert time.monotonic() < until, messages.text
        time.sleep(0.01)


def test_the_end_of_a_run_gives_up_on_a_mirror_that_stays_unreachable(
    run: RunFolder, failing: str, messages: pytest.LogCaptureFixture
) -> None:
    Failing.left = 0
    with Mirroring(run, failing, keep=-1):
        pass
    assert messages.text.count("trying again") == 2
    assert "no route to host; the mirror is not complete" in messages.text


def test_another_run_is_not_overwritten(
    run: RunFolder, failing: str, mirror: Path, messages: pytest.LogCaptureFixture
) -> None:
    with Mirroring(run, failing, keep=-1):
        pass
    expected = files_of(mirror)
    (run.path / "mirror.json").unlink()
    save(run, 3)
    with Mirroring(run, failing, keep=-1):
        pass
    assert "is the mirror of another run" in messages.text
    assert files_of(mirror) == expected


@pytest.mark.long
def test_training_restores_and_resumes_bit_for_bit(
    tmp_path: Path, datasets_dir: Path, failing: str, mirror: Path
) -> None:
    straight = make_run(tmp_path / "straight", min_train_tokens=8 * 128)
    assert launch(straight, load_run(straight.path), StartOptions(), on_datasets(datasets_dir)) == 0
    run = make_run(tmp_path / "run", min_train_tokens=8 * 128)
    Failing.left = 25  # the connection breaks in the middle
    config = load_run(run.path)
    assert launch(run, config, StartOptions(mirror=failing), on_datasets(datasets_dir)) == 0
    assert_same_outcome(run, straight)
    assert steps_in(mirror) != steps_in(run.path)
    Failing.left = 10**9
    assert (
        launch(run, config, StartOptions(mirror=failing), on_datasets(datasets_dir)) == 0
    )  # had finished
    copy = shutil.copytree(mirror, tmp_path / "copy")  # Orbax can't read the name of the mirror
    assert_same_outcome(RunFolder(copy), straight)


@pytest.mark.long
def test_a_run_whose_machine_is_lost_twice_equals_one_that_ran_through(
    tmp_path: Path, datasets_dir: Path, mirror: Path
) -> None:
    straight, run = make_run(tmp_path / "straight"), make_run(tmp_path / "run")
    assert train(straight, datasets_dir).returncode == 0
    for step in (5, 15):
        lose_at_step(step, run, datasets_dir, mirror)
        assert not run.path.exists()
    finished = train(run, datasets_dir, "--mirror", str(mirror))
    assert finished.returncode == 0, finished.stderr
    assert "restored from" in finished.stderr
    # on a busy machine a run may end before the loss that its last checkpoint is to bring
    assert re.search("resumes after step|is finished", finished.stderr)
    assert_same_outcome(run, straight)
    copy = shutil.copytree(mirror, tmp_path / "copy")  # Orbax can't read the name of the mirror
    assert_same_outcome(RunFolder(copy), straight)


def lose_at_step(step: int, run: RunFolder, datasets_dir: Path, mirror: Path) -> None:
    """Kill the command once the mirror has a checkpoint of this step, and delete the run folder."""
    with subprocess.Popen(
        command(run, datasets_dir, "--mirror", str(mirror)), stderr=subprocess.DEVNULL
    ) as process:
        while not any(found >= step for found in steps_in(mirror)):
            assert process.poll() is None, "ended before the mirror had the checkpoint"
            time.sleep(0.01)
        process.kill()
    shutil.rmtree(run.path)


@pytest.mark.long
def test_reinforcement_learning_restores_its_texts_and_goes_on(
    tmp_path: Path, mirror: Path
) -> None:
    weights = write_start(tmp_path / "weights")
    straight = make_reinforcement_run(tmp_path / "straight", weights)
    run = make_reinforcement_run(tmp_path / "run", weights)
    assert reinforce(straight) == reinforce(run, mirror=str(mirror)) == 0
    shutil.rmtree(run.path)
    shutil.rmtree(list_checkpoints(mirror / "checkpoints")[-1].folder)
    restore_if_empty(run, str(mirror), lambda _: None)
    assert steps_in(run.path) == [0, 3]
    assert reinforce(run, mirror=str(mirror)) == 0
    texts = [
        {path.name: path.read_text() for path in folder.rollouts.iterdir()}
        for folder in (run, straight, RunFolder(mirror))
    ]
    assert texts[0] == texts[1] == texts[2]
    assert [step.reproducible for step in steps_of(run)] == [
        step.reproducible for step in steps_of(straight)
    ]
    for name, array in final_arrays(straight).items():
        assert final_arrays(run)[name].tobytes() == array.tobytes(), name
