"""`model.py` shows the model of a run: parameters, initial values, how sharding modes split it."""

import json
import math
from typing import Any

import pytest
from click.testing import CliRunner

from rungs.cli import model
from tests.support.committed_runs import ROOT

VOCAB, EMB, LAYERS, HEADS = 4096, 128, 4, 4
FFN, HEAD_DIM = 4 * EMB, EMB // HEADS
BLOCK = {
    "attention.query.kernel": (EMB, HEADS, HEAD_DIM),
    "attention.key.kernel": (EMB, HEADS, HEAD_DIM),
    "attention.value.kernel": (EMB, HEADS, HEAD_DIM),
    "attention.output.kernel": (HEADS, HEAD_DIM, EMB),
    "attention.output.bias": (EMB,),
    "attention_norm.scale": (EMB,),
    "attention_norm.bias": (EMB,),
    "feed_forward.up.kernel": (EMB, FFN),
    "feed_forward.up.bias": (FFN,),
    "feed_forward.down.kernel": (FFN, EMB),
    "feed_forward.down.bias": (EMB,),
    "feed_forward_norm.scale": (EMB,),
    "feed_forward_norm.bias": (EMB,),
}
SHAPES = {
    "token_embedding.embedding": (VOCAB, EMB),
    "final_norm.scale": (EMB,),
    "final_norm.bias": (EMB,),
    "head.kernel": (EMB, VOCAB),
    **{f"blocks.{name}": (LAYERS, *shape) for name, shape in BLOCK.items()},
}
"""What `runs/layers` asks for, written down by hand."""
PARAMETERS = sum(map(math.prod, SHAPES.values()))


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return show("--json", is_json=True)


def show(*options: str, is_json: bool = False) -> Any:
    result = CliRunner().invoke(model.main, [str(ROOT / "runs/layers"), *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.output) if is_json else result.output


def arrays(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {array["name"]: array for array in summary["arrays"]}


@pytest.mark.long
def test_shapes_and_shares_match_a_count_by_hand(summary: dict[str, Any]) -> None:
    assert summary["parameters"] == PARAMETERS == 1_840_384
    found = arrays(summary)
    assert {name: tuple(array["shape"]) for name, array in found.items()} == SHAPES
    assert {array["dtype"] for array in found.values()} == {"float32"}
    for name, array in found.items():
        assert array["share"] == pytest.approx(math.prod(SHAPES[name]) / PARAMETERS)


def test_each_module_counts_the_parameters_in_it(summary: dict[str, Any]) -> None:
    modules = {module["path"]: module for module in summary["modules"]}
    assert modules[""]["type"] == "GPT"
    for path, module in modules.items():
        inside = [name for name in SHAPES if not path or name.startswith(f"{path}.")]
        assert module["parameters"] == sum(math.prod(SHAPES[name]) for name in inside), path


def test_initial_values_are_those_of_gpt2(summary: dict[str, Any]) -> None:
    """Of 16,384 values or more, the measured deviation is within 2% of the true one."""
    for name, array in arrays(summary).items():
        into_residual_stream = name.endswith(("output.kernel", "down.kernel"))
        expected = 0.02 / math.sqrt(2 * LAYERS) if into_residual_stream else 0.02
        is_drawn = name.endswith(("kernel", "embedding"))
        assert array["initial_std"] == pytest.approx(expected if is_drawn else 0, rel=0.02), name


def test_splits_are_those_of_the_sharding_modes(summary: dict[str, Any]) -> None:
    found = {name: array["splits"] for name, array in arrays(summary).items()}
    assert found["blocks.feed_forward.up.kernel"] == {
        "dp": {},
        "fsdp": {"emb": "data"},
        "tp": {"ffn": "tensor"},
        "fsdp_tp": {"emb": "data", "ffn": "tensor"},
        "cp": {"emb": "data × context"},
    }
    assert found["head.kernel"] == {
        "dp": {},
        "fsdp": {"emb": "data"},
        "tp": {"vocab": "tensor"},
        "fsdp_tp": {"emb": "data", "vocab": "tensor"},
        "cp": {"emb": "data × context"},
    }
    assert all(splits["dp"] == {} for splits in found.values())


def test_an_axis_that_is_not_divisible_is_not_split() -> None:
    found = arrays(show("--json", "--data", "4", "--tensor", "3", is_json=True))
    assert found["blocks.feed_forward.up.kernel"]["splits"] == {
        "dp": {},
        "fsdp": {"emb": "data"},
        "tp": {},
        "fsdp_tp": {"emb": "data"},
        "cp": {"emb": "data × context"},
    }


def test_the_text_has_the_module_tree_and_the_arrays() -> None:
    lines = [line.split() for line in show().splitlines()]
    assert lines[0] == ["module", "parameters"]
    assert ["GPT", "1,840,384"] in lines
    assert ["feed_forward:", "FeedForward", "526,848"] in lines
    (head,) = [line for line in lines if line and line[0] == "head.kernel"]
    assert head[1:6] == ["emb", "vocab", "128", "×", "4,096"]
    assert head[6] == "float32"
