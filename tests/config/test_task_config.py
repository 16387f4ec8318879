"""Tasks in a config: what is refused, and with which words."""

import json
from pathlib import Path
from typing import Any

import pytest

from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.common.strict_json import StrictModel
from rungs.config.reinforce_config import SETTINGS, ReinforceConfig, TaskConfig
from rungs.config.run_config import RunConfig
from tests.support.configs import model_config


def parse(**keys: Any) -> TaskConfig:
    return strict_json.parse(json.dumps(keys), Path("task.json"), TaskConfig)


@pytest.mark.parametrize(
    "keys",
    [
        {"source": "parity", "settings": {"max_bits": 20}},
        {"source": "items.jsonl", "validation_source": "held-out.jsonl", "verifier": "gsm8k"},
        {"source": "../shared/items.jsonl", "verifier": "reward.py"},
        {"source": "reasoning-gym:countdown", "settings": {"whatever": 1}},
    ],
)
def test_what_is_allowed(keys: dict[str, Any]) -> None:
    config = parse(**keys)
    assert config.is_file is keys["source"].endswith(".jsonl")
    assert config.reasoning_gym_name == (keys["source"].partition(":")[2] or None)


@pytest.mark.parametrize(
    ("keys", "needs_trust"),
    [
        ({"source": "parity"}, False),
        ({"source": "parity", "tools": ["calculator"]}, False),
        ({"source": "parity", "tools": ["calculator", "python"]}, True),
        ({"source": "parity", "tools": ["tools.py"]}, True),
        ({"source": "items.jsonl", "verifier": "exact"}, False),
        ({"source": "items.jsonl", "verifier": "reward.py"}, True),
        ({"source": "items.jsonl", "environment": "environment.py"}, True),
        ({"source": "openenv:echo_env", "train_items": 9}, True),
    ],
)
def test_the_command_to_resume_trusts_what_the_run_trusted(
    keys: dict[str, Any], needs_trust: bool
) -> None:
    train = ReinforceConfig.model_construct(tasks=[parse(source="parity"), parse(**keys)])
    command = RunConfig(model_config(), train).command_again
    assert command == "uv run reinforce.py" + " --trust-verifier" * needs_trust


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "source: missing"),
        ({"source": "parity", "sourse": 1}, "did you mean source?"),
        ({"source": "partiy"}, 'source: "partiy" is unknown; did you mean parity?'),
        ({"source": "gsm"}, 'source: "gsm" is unknown; use parity, countdown, sort, brackets, add'),
        ({"source": "reasoning-gym:"}, 'source: "reasoning-gym:" is unknown'),
        ({"source": "my-reasoning-gym:gcd"}, 'source: "my-reasoning-gym:gcd" is unknown'),
        ({"source": "parity", "settings": {"max_bit": 9}}, "settings of parity: max_bit: unknown"),
        ({"source": "parity", "settings": {"max_bits": "9"}}, 'settings of parity: max_bits: "9"'),
        ({"source": "parity", "settings": {"min_bits": 9, "max_bits": 8}}, "settings of parity: m"),
        ({"source": "countdown", "settings": {"numbers": 1, "largest": 0}}, "numbers: 1 is not al"),
        ({"source": "items.jsonl", "settings": {"x": 1}}, "settings: files of items have none"),
        ({"source": "parity", "validation_source": "v.jsonl"}, "validation_source: parity generat"),
        ({"source": "items.jsonl", "validation_source": "v.json"}, 'validation_source: "v.json" i'),
        ({"source": "parity", "verifier": "exakt"}, '"exakt" is unknown; did you mean exact?'),
        ({"source": "parity", "verifier": "x"}, '"x" is unknown; use exact, last_number, gsm8k,'),
        ({"source": "parity", "verifier": "../x.py"}, '"../x.py" is not in the run folder'),
        ({"source": "parity", "verifier": "/x.py"}, '"/x.py" is not in the run folder'),
        ({"source": "parity", "verifier_timeout_seconds": 0.0}, "0.0 is not allowed"),
        ({"source": "parity", "validation_items": 0}, "0 is not allowed; must be at least 1"),
        ({"source": "verifiers:", "train_items": 9}, 'source: "verifiers:" is unknown'),
        ({"source": "verifiers:x"}, "train_items: give a number, which verifiers needs"),
        ({"source": "openenv:a:B", "train_items": 9, "tools": ["calculator"]}, "has its own env"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(**keys)
    [line] = str(caught.value).splitlines()
    assert line.startswith("task.json: ")
    assert message in line


def test_environments_of_libraries_have_turns() -> None:
    config = parse(source="openenv:module:Class", train_items=9, turn_end="?")
    assert config.library == "openenv"
    assert config.has_turns


@pytest.mark.parametrize("model", [TaskConfig, *SETTINGS.values()])
def test_every_key_is_documented(model: type[StrictModel]) -> None:
    for entry in model.model_json_schema()["properties"].values():
        assert entry["description"].endswith(".")
