"""Steps of reinforcement learning with a NaN are saved and replayed, as in training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.reinforcement import policy_update
from rungs.reinforcement.policy_learner import reinforcement
from rungs.training.failed_steps import find_failed_step, open_failed_step
from rungs.training.replay import replay
from tests.support.tiny_reinforcement import (
    make_reinforcement_run,
    reinforce,
    steps_of,
    write_start,
)


@pytest.mark.long
def test_a_failed_step_is_saved_and_its_first_bad_tensor_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_reinforcement_run(tmp_path / "run", write_start(tmp_path / "start"), steps=3)
    advantages, calls = policy_update.advantages, iter(range(10))

    def with_nan(*args: Any) -> Any:
        found_PG = advantages(*args)
        return np.full_like(found_PG, np.nan) if next(calls) == 1 else found_PG

    monkeypatch.setattr(policy_update, "advantages", with_nan)
    assert reinforce(run) == 0
    assert [step.train_loss is None for step in steps_of(run)] == [False, True, False]
    assert find_failed_step(run, "step-000001")
    failed = open_failed_step(run, "step-000001")
    assert np.isnan(failed.batch["advantages_ABS"]).any()
    capsys.readouterr()
    assert replay(run, "step-000001", reinforcement(trust_verifier=False)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "gradient of the logits is the first tensor that is not finite"
