"""Reading model.json and train.json: all errors at once, each in one line that says what to do."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungs.common.errors import UserError
from rungs.config import reference, run_config
from rungs.config.model_config import ModelConfig
from rungs.config.train_config import TrainConfig
from rungs.experiments.folder import CONFIG
from rungs.experiments.kinds import KINDS
from tests.support.committed_runs import COMMITTED_RUNS, REINFORCEMENT_RUNS, ROOT

# Only the keys that the run folders of the blog's reference code have.
REFERENCE_MODEL = {
    "vocab_size": 50257,
    "context_length": 1024,
    "emb_dim": 768,
    "n_heads": 12,
    "n_layers": 12,
    "qkv_bias": False,
}
REFERENCE_TRAIN = {
    "dataset": "gpjt/fineweb-gpt2-tokens",
    "min_train_tokens": 3260190720,
    "start_train_token": 0,
    "start_val_token": 50_000_000,
    "epochs": 1,
    "microbatch_size": 6,
    "gradient_accumulation_steps": 16,
    "learning_rate": 0.0014,
    "warmup_period_percent": 5,
    "weight_decay": 0.01,
    "clipping_max_norm": 3.5,
    "drop_rate": 0.1,
    "checkpoint_interval": 617,
}


def write_run(folder: Path, model: Any, train: Any) -> Path:
    for name, content in (("model.json", model), ("train.json", train)):
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


def errors_of(
    folder: Path, model: Any = REFERENCE_MODEL, train: Any = REFERENCE_TRAIN
) -> list[str]:
    with pytest.raises(UserError) as raised:
        run_config.load_run(write_run(folder, model, train))
    return [line.removeprefix(f"{folder}/") for line in str(raised.value).splitlines()]


def without(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in keys}


@pytest.mark.parametrize(
    ("model", "train"),
    [
        (REFERENCE_MODEL, REFERENCE_TRAIN),
        (REFERENCE_MODEL | {"qkv_bias": True}, REFERENCE_TRAIN | {"drop_rate": 0.0}),
        (REFERENCE_MODEL | {"n_layers": 0}, REFERENCE_TRAIN | {"min_train_tokens": -1}),
        (without(REFERENCE_MODEL, "qkv_bias"), without(REFERENCE_TRAIN, "clipping_max_norm")),
        (
            REFERENCE_MODEL,
            without(REFERENCE_TRAIN, "warmup_period_percent", "weight_decay", "start_val_token"),
        ),
    ],
)
def test_the_reference_keys_alone_describe_gpt2(
    tmp_path: Path, model: dict[str, Any], train: dict[str, Any]
) -> None:
    run = run_config.load_run(write_run(tmp_path, model, train))
    for key, value in (model | train).items():
        assert getattr(run.model if key in model else run.train, key) == value
    assert run.model.positions == "learned"
    assert (run.model.norm, run.model.norm_placement) == ("layer_norm", "before")
    assert (run.model.feed_forward, run.model.hidden_dim) == ("gelu_tanh", 4 * 768)
    assert run.train.target_offset == 1


def test_all_errors_of_both_files_are_reported_at_once(tmp_path: Path) -> None:
    model = REFERENCE_MODEL | {"n_heads": 7, "emb_dim": 768.0, "learning_rate": 1, "norms": "x"}
    model["mup"] = 128
    train = REFERENCE_TRAIN | {"epochs": 0, "learning_rte": 1, "drop_rate": 1.0, "dataset": 3}
    lines = errors_of(tmp_path, model, without(train, "learning_rate"))
    assert sorted(lines) == [
        "model.json: emb_dim: 768.0 is not allowed; must be of type integer",
        "model.json: learning_rate: unknown key (value 1); it belongs in train.json",
        "model.json: mup: 128 is not allowed; must be an object {…}",
        'model.json: norms: unknown key (value "x"); did you mean norm?',
        "train.json: dataset: 3 is not allowed; must be of type string",
        "train.json: drop_rate: 1.0 is not allowed; must be less than 1",
        "train.json: epochs: 0 is not allowed; must be at least 1",
        "train.json: learning_rate: missing; this key is required",
        "train.json: learning_rte: unknown key (value 1); did you mean learning_rate?",
    ]


def test_inconsistent_sizes_are_reported(tmp_path: Path) -> None:
    assert errors_of(tmp_path, REFERENCE_MODEL | {"n_heads": 7}) == [
        "model.json: n_heads: 7 does not divide emb_dim 768; the nearest that does is 6"
    ]
    assert errors_of(tmp_path, without(REFERENCE_MODEL, "n_heads")) == [
        "model.json: n_heads: missing; required if n_layers is above 0"
    ]
    odd = {"emb_dim": 9, "n_heads": 3, "positions": "sinusoidal", "context_length": "8"}
    assert errors_of(tmp_path, REFERENCE_MODEL | odd) == [
        'model.json: context_length: "8" is not allowed; must be of type integer',
        'model.json: emb_dim: 9 is odd; positions "sinusoidal" needs an even number',
    ]


LLAMA_3 = {
    "type": "llama3",
    "factor": 8,
    "low_frequency_factor": 1,
    "high_frequency_factor": 4,
    "original_context_length": 8192,
}
ROPE = {"positions": "rope"}
LORA = {"rank": 8, "alpha": 16, "targets": ["query"]}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"n_kv_heads": 5}, "n_kv_heads: 5 does not divide n_heads 12; the nearest that does is 4"),
        ({"n_kv_heads": 24}, "n_kv_heads: 24 does not divide n_heads 12; the nearest that does is"),
        (ROPE | {"head_dim": 7}, 'head_dim: 7 is odd; positions "rope" needs an even number'),
        (ROPE | {"emb_dim": 60}, 'head_dim: 5 is odd; positions "rope" needs an even number'),
        ({"rope_scaling": LLAMA_3}, 'rope_scaling: needs positions "rope", not "learned"'),
        ({"positions": "none", "sliding_window": 4, "sliding_rope_theta": 1e4}, "sliding_rope_the"),
        (ROPE | {"sliding_rope_theta": 1e4}, "sliding_rope_theta: needs sliding_window"),
        ({"layer_pattern": ["sliding", "global"]}, "layer_pattern: needs sliding_window"),
        (ROPE | {"layer_pattern": ["sliding", "nope"]}, "layer_pattern: needs sliding_window"),
        ({"layer_pattern": ["global", "nope"]}, 'layer_pattern: "nope" needs positions "rope", no'),
        ({"sliding_window": 4, "layer_pattern": ["sliding", "local"]}, 'layer_pattern.1: "local"'),
        ({"sliding_window": 4, "layer_pattern": ["local"]}, 'layer_pattern.0: "local" is not allo'),
        ({"sliding_window": 4, "layer_pattern": []}, "layer_pattern: [] is not allowed; must not"),
        ({"qk_norm": True, "qk_norm_scope": "all_heads"}, 'qk_norm_scope: "all_heads" needs norm'),
        ({"qk_norm": True, "norm": "none"}, 'qk_norm: true, but norm is "none"; choose a norm or'),
        ({"embedding_norm": True, "norm": "none"}, 'embedding_norm: true, but norm is "none"; cho'),
        ({"zero_init_residual": True, "residual": False}, "zero_init_residual: needs residual; wi"),
        ({"norm_parameters": False, "norm": "rms_norm_plus_one"}, "norm_parameters: false, but no"),
        ({"n_experts": 4}, "n_experts and experts_per_token: give both or neither"),
        ({"experts_per_token": 2}, "n_experts and experts_per_token: give both or neither"),
        ({"n_experts": 4, "experts_per_token": 5}, "experts_per_token: 5 is above n_experts 4"),
        ({"n_experts": 4, "experts_per_token": 2, "feed_forward": "none"}, "n_experts: 4, but fee"),
        ({"ffn_dim": 64, "feed_forward": "none"}, 'ffn_dim: 64, but feed_forward is "none"; remov'),
        ({"n_layers": 0, "norm_placement": "after"}, 'norm_placement: "after" has no effect if n_'),
    ],
)
def test_inconsistent_architectures_are_reported(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    (found,) = errors_of(tmp_path, REFERENCE_MODEL | changes)
    assert found.startswith(f"model.json: {line}")


@pytest.mark.parametrize(
    ("scaling", "line"),
    [
        (LLAMA_3 | {"type": "linear"}, 'type "linear" takes only factor'),
        (
            without(LLAMA_3, "low_frequency_factor"),
            'type "llama3" needs low_frequency_factor, high_frequency_factor and'
            " original_context_length",
        ),
        (
            without(LLAMA_3, "original_context_length"),
            'type "llama3" needs low_frequency_factor, high_frequency_factor and'
            " original_context_length",
        ),
        (LLAMA_3 | {"type": "yarn"}, 'attention_factor is for type "yarn", which needs it'),
        (
            LLAMA_3 | {"attention_factor": 1.2},
            'attention_factor is for type "yarn", which needs it',
        ),
        (
            without(LLAMA_3, "factor", "low_frequency_factor")
            | {"type": "yarn", "factor": 2, "attention_factor": 1},
            'type "yarn" needs low_frequency_factor, high_frequency_factor and'
            " original_context_length",
        ),
        (
            LLAMA_3 | {"high_frequency_factor": 1},
            "low_frequency_factor must be below high_frequency_factor",
        ),
    ],
)
def test_inconsistent_rope_scalings_are_reported(
    tmp_path: Path, scaling: dict[str, Any], line: str
) -> None:
    (found,) = errors_of(tmp_path, REFERENCE_MODEL | ROPE | {"rope_scaling": scaling})
    assert found.startswith("model.json: rope_scaling: {")
    assert f" is not allowed; {line}" in found


def test_errors_in_nested_objects_name_the_full_key(tmp_path: Path) -> None:
    scaling = LLAMA_3 | {"factor": 0, "base": 1}
    train = REFERENCE_TRAIN | {"start_from": "imported", "lora": LORA | {"targets": ["q"]}}
    assert errors_of(tmp_path, REFERENCE_MODEL | ROPE | {"rope_scaling": scaling}, train) == [
        "model.json: rope_scaling.factor: 0 is not allowed; must be greater than 0",
        "model.json: rope_scaling.base: unknown key (value 1); the keys are type, factor,"
        " low_frequency_factor, high_frequency_factor, original_context_length, whole_pairs,"
        " attention_factor, score_mscale",
        "train.json: lora.targets.0: \"q\" is not allowed; must be 'query', 'key', 'value',"
        " 'output', 'gate', 'up' or 'down'",
    ]


def test_lora_needs_weights_to_adapt(tmp_path: Path) -> None:
    assert errors_of(tmp_path, train=REFERENCE_TRAIN | {"lora": LORA}) == [
        'train.json: lora: needs start_from, the weights to adapt, for example "imported"'
    ]


def test_the_layer_pattern_repeats_until_the_last_layer() -> None:
    def kinds(n_layers: int, **changes: Any) -> list[str]:
        architecture = REFERENCE_MODEL | {"n_layers": n_layers} | changes
        return list(ModelConfig.model_validate(architecture).layer_kinds())

    pattern = ["sliding", "sliding", "global"]
    patterned = {"sliding_window": 4, "layer_pattern": pattern}
    assert kinds(7, **patterned) == [*pattern, *pattern, "sliding"]
    assert kinds(2, **patterned) == ["sliding", "sliding"]
    assert kinds(2, sliding_window=4) == ["sliding", "sliding"]
    assert kinds(2) == ["global", "global"]
    assert kinds(0, **patterned) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"epochs": 1,\n "seed": }', "malformed JSON at line 2, column 10: Expecting value"),
        ("[1]", "must hold a JSON object {…}, not [1]"),
        ("", "malformed JSON at column 1: Expecting value"),
        ("[" * 100_000, "unreadable JSON: "),
        ('{"seed": ' + "1" * 5000 + "}", "unreadable JSON: Exceeds the limit (4300 digits)"),
    ],
)
def test_malformed_json_is_reported(tmp_path: Path, text: str, line: str) -> None:
    (found,) = errors_of(tmp_path, train=text)
    assert found.startswith(f"train.json: {line}")
    assert "sys." not in found


def test_duplicate_keys_and_numbers_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    text = json.dumps(REFERENCE_TRAIN)[:-1] + ', "epochs": 1, "beta1": NaN, "beta2": 1e999}'
    assert sorted(errors_of(tmp_path, train=text)) == [
        "train.json: beta1: NaN is not allowed; must be a finite number",
        "train.json: beta2: Infinity is not allowed; must be a finite number",
        "train.json: epochs: given more than once; keep one",
    ]


def test_numbers_that_float32_does_not_have_are_reported(tmp_path: Path) -> None:
    keys = {"learning_rate": 1e308, "epsilon": 1e-300, "weight_decay": 4e38}
    allowed = "is not allowed; must be from 1.18e-38 to 3.4e+38, as float32 can hold it"
    assert sorted(errors_of(tmp_path, train=json.dumps(REFERENCE_TRAIN | keys))) == [
        f"train.json: {key}: {value} {allowed}"
        for key, value in (
            ("epsilon", "1e-300"),
            ("learning_rate", "1e+308"),
            ("weight_decay", "4e+38"),
        )
    ]


def test_a_typo_is_reported_beside_errors_across_keys(tmp_path: Path) -> None:
    """Checks across keys also run when other keys are wrong, and see valid objects parsed."""
    train = {"sharding": {"mode": "dp", "data": 4}, "lora": None, "epoch": 1}
    with pytest.raises(UserError) as raised:
        run_config.load_run(write_run(tmp_path, REFERENCE_MODEL, REFERENCE_TRAIN | train))
    lines = [
        line.removeprefix(f"{tmp_path}/train.json: ") for line in str(raised.value).split("\n")
    ]
    assert [line.split(":")[0] for line in lines] == ["epoch", "microbatch_size"]


def test_the_nearest_divisor_of_a_large_number_is_found_quickly(tmp_path: Path) -> None:
    model = REFERENCE_MODEL | {"emb_dim": 2**31 - 1, "n_heads": 12}
    with pytest.raises(UserError, match=r"; the nearest that does is 1$"):
        run_config.load_run(write_run(tmp_path, model, REFERENCE_TRAIN))


@pytest.mark.parametrize("member", [r'"tokenizer": "\ud800"', r'"lineage": {"\udfff": 1}'])
def test_a_lone_surrogate_is_reported(member: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, REFERENCE_MODEL, REFERENCE_TRAIN)
    text = (folder / "train.json").read_text().rstrip()[:-1]
    (folder / "train.json").write_text(f"{text}, {member}}}")
    with pytest.raises(UserError, match=r"train\.json: holds an invalid character"):
        run_config.load_run(folder)


def test_missing_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        run_config.load_run(tmp_path)
    assert [line.split(": ")[1] for line in str(raised.value).splitlines()] == ["no such file"] * 2


def test_committed_schemas_and_the_page_of_keys_are_current(tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "docs").mkdir()
    reference.write_generated_files(tmp_path, {CONFIG: list(KINDS.values())})
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        committed = ROOT / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), (
            f"{committed} is out of date: run `uv run config.py`"
        )


@pytest.mark.parametrize("run", [*COMMITTED_RUNS, *REINFORCEMENT_RUNS], ids=lambda path: path.name)
def test_committed_runs_load_and_name_their_schemas(run: Path) -> None:
    run_config.load_any_run(run)
    for name in run_config.config_files(run):
        schema = json.loads((run / name).read_text())["$schema"]
        assert (run / schema).resolve() == ROOT / "schemas" / name.replace(".json", ".schema.json")


def test_configs_survive_a_round_trip_through_json() -> None:
    model = ModelConfig.model_validate(REFERENCE_MODEL)
    train = TrainConfig.model_validate(REFERENCE_TRAIN | {"dataset": {"a": 1, "b": 0.5}})
    assert ModelConfig.model_validate_json(json.dumps(model.as_json())) == model
    assert TrainConfig.model_validate_json(json.dumps(train.as_json())) == train


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(key=st.sampled_from([*ModelConfig.model_fields, *TrainConfig.model_fields]), value=JSON)
def test_any_value_of_any_key_loads_or_is_reported(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    folder = tmp_path_factory.mktemp("run")
    in_model = key in ModelConfig.model_fields
    model = REFERENCE_MODEL | ({key: value} if in_model else {})
    train = REFERENCE_TRAIN | ({} if in_model else {key: value})
    message = ""
    try:
        run_config.load_run(write_run(folder, model, train))
    except UserError as error:
        message = str(error)
    assert all(line.startswith(f"{folder}/") for line in message.splitlines())
