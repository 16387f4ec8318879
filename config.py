"""`model.json` and `train.json` as frozen, strict types: the only place where a default stands.

`load_run` reads both files of a run folder and reports every mistake in them at once. Each field
below is a key of the JSON file; the text under it is its documentation, also in the JSON schemas
under `schemas/`, which editors use to complete and check run folders.
"""

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, Discriminator, Field, Tag

import strict_json
from errors import UserError
from strict_json import StrictModel


def _not_zero(number: int) -> int:
    if number == 0:
        raise ValueError("must be at least 1, or -1 for all")
    return number


Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountOrAll = Annotated[
    int,
    Field(ge=-1, le=2**62, json_schema_extra={"not": {"const": 0}}),
    AfterValidator(_not_zero),
]
TokenIndex = Annotated[int, Field(ge=0, le=2**62)]
Percent = Annotated[float, Field(ge=0, le=100)]
Positive = Annotated[float, Field(gt=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Mixture = Annotated[dict[str, Positive], Field(min_length=1)]
NameOrMixture = Annotated[
    Annotated[str, Tag("(name)")] | Annotated[Mixture, Tag("(mixture)")],
    Discriminator(lambda value: "(mixture)" if isinstance(value, dict) else "(name)"),
]


class Config(StrictModel):
    """What both files share."""

    schema_address: str | None = Field(default=None, alias="$schema")
    """Where editors find the JSON schema of this file."""

    def as_json(self) -> dict[str, Any]:
        """Every key with its value, defaults filled in, ready for `json.dumps`."""
        return self.model_dump(mode="json", exclude={"schema_address"})


class ModelConfig(Config):
    """What the model is: the architecture, from A-to-A to GPT-2, as data."""

    vocab_size: Size
    """Number of token ids the model knows; at least the tokenizer's."""
    context_length: Size
    """Tokens in a training sequence, and the longest that learned positions can serve."""
    emb_dim: Size
    """Width of the residual stream."""
    n_layers: Annotated[int, Field(ge=0, le=10_000)]
    """Transformer blocks; with 0 the embedding goes straight into the output head."""
    n_heads: Size | None = None
    """Attention heads of each block; must divide emb_dim. Needed where n_layers is above 0."""
    qkv_bias: bool = False
    """Whether the query, key and value projections add a bias."""
    positions: Literal["none", "learned", "sinusoidal"] = "learned"
    """What is added to the token embedding: nothing, a learned table (GPT-2), or the fixed sines
    and cosines of «Attention Is All You Need» (Vaswani et al. 2017, section 3.5)."""
    residual: bool = True
    """Whether attention and feed-forward add to their input (true) or replace it (false)."""
    norm: Literal["none", "layer_norm"] = "layer_norm"
    """Normalisation: none, or LayerNorm (Ba et al. 2016) with scale and bias."""
    norm_placement: Literal["before", "after"] = "before"
    """Norm before each sub-layer and once before the head (GPT-2), or after each sub-layer's
    residual sum (the original transformer)."""
    norm_epsilon: Positive = 1e-5
    """Added to the variance inside each norm."""
    feed_forward: Literal["none", "gelu_tanh", "gelu"] = "gelu_tanh"
    """Feed-forward part of each block: none; GELU in its tanh form, as GPT-2 has it; or the exact
    GELU (Hendrycks & Gimpel 2016)."""
    ffn_dim: Size | None = None
    """Hidden width of the feed-forward part; four times emb_dim where absent."""
    init: Literal["gpt2", "truncated_normal"] = "gpt2"
    """How weights start. gpt2: normal with σ 0.02, residual projections ÷ √(2·n_layers).
    truncated_normal: cut at ±3σ, σ² = 2/(in + out) (Glorot & Bengio 2010). Biases start at 0."""

    CHECKS = (
        "_heads_given",
        "_heads_divide_width",
        "_sinusoids_pair_up",
        "_width_has_a_part",
        "_norm_has_a_place",
    )

    def _heads_given(self) -> str | None:
        if self.n_layers and self.n_heads is None:
            return "n_heads: missing; needed where n_layers is above 0"
        return None

    def _heads_divide_width(self) -> str | None:
        if not self.n_layers or not self.n_heads or self.emb_dim % self.n_heads == 0:
            return None
        near = _nearest_divisor(self.emb_dim, self.n_heads)
        return (
            f"n_heads: {self.n_heads} does not divide emb_dim {self.emb_dim}; {near} is the"
            " nearest that does"
        )

    def _sinusoids_pair_up(self) -> str | None:
        if self.positions == "sinusoidal" and self.emb_dim % 2:
            return f'emb_dim: {self.emb_dim} is odd; positions "sinusoidal" need it even'
        return None

    def _width_has_a_part(self) -> str | None:
        if self.ffn_dim and self.feed_forward == "none":
            return f'ffn_dim: {self.ffn_dim}, but feed_forward is "none"; leave one of them out'
        return None

    def _norm_has_a_place(self) -> str | None:
        if self.norm != "none" and self.norm_placement == "after" and not self.n_layers:
            return 'norm_placement: "after" places no norm where n_layers is 0; set norm "none"'
        return None

    @property
    def head_dim(self) -> int:
        """Width of one attention head; only where there are layers."""
        assert self.n_heads is not None
        return self.emb_dim // self.n_heads

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the feed-forward part."""
        return self.ffn_dim or 4 * self.emb_dim


class ShardingConfig(StrictModel):
    """How the devices share the work."""

    mode: Literal["dp"] = "dp"
    """dp: data-parallel, each device works on its part of every microbatch."""
    data: CountOrAll = -1
    """Devices along the data axis; -1 takes all there are. Must divide microbatch_size."""


class Lineage(StrictModel):
    """Where a run folder made by `train.py --like` came from."""

    like: str
    """The run folder that was copied."""
    set: dict[str, Any]
    """The keys that were changed, with their new values."""


class TrainConfig(Config):
    """How a model is trained."""

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(
        {
            "schema_address",
            "lineage",
            "tokenizer",
            "checkpoint_interval",
            "keep_checkpoints",
            "chart_style",
            "validation_tokens",
            "start_val_token",
            "sharding",
            "deterministic",
        }
    )
    """Keys that may differ between two starts of one run: they change neither the mathematics
    nor the order of the data."""

    dataset: NameOrMixture
    """Name of a dataset: `python-stdlib` (built in), a folder under `datasets/`, or a hub id
    `owner/name`. Or a mixture: `{"name": weight, …}`."""
    microbatch_size: Size
    """Sequences in one microbatch, over all devices together."""
    learning_rate: Positive
    """Peak learning rate."""
    checkpoint_interval: Size
    """Steps between checkpoints, counted from step 0; the last step always has one."""
    tokenizer: str = "gpt2"
    """Hub id of the tokenizer of datasets that come without one; others bring their own."""
    gradient_accumulation_steps: Size = 1
    """Microbatches per step: the step's batch is this many times microbatch_size sequences."""
    min_train_tokens: CountOrAll = -1
    """Tokens to train on in each epoch, rounded up to whole steps; -1 takes all whole steps."""
    start_train_token: TokenIndex = 0
    """Index in the training tokens at which to start."""
    start_val_token: TokenIndex = 0
    """Index in the validation tokens at which to start."""
    validation_tokens: Size = 524_288
    """At most this many tokens are read in each validation, rounded up to a whole sequence."""
    epochs: Size = 1
    """How often to go through the training tokens."""
    shuffle: bool = False
    """Whether to visit the sequences in a random order, another in each epoch, drawn from seed."""
    target_offset: Literal[0, 1] = 1
    """1: predict the next token. 0: predict the input itself (A-to-A)."""
    warmup_period_percent: Percent = 5.0
    """Share of all steps in which the learning rate rises to its peak."""
    start_learning_rate_percent: Percent = 0.001
    """Learning rate at step 0, as a share of the peak."""
    min_learning_rate_percent: Percent = 10.0
    """Learning rate at the end of the cosine, as a share of the peak."""
    beta1: BelowOne = 0.9
    """AdamW: decay of the mean of gradients."""
    beta2: BelowOne = 0.999
    """AdamW: decay of the mean of squared gradients."""
    epsilon: Positive = 1e-8
    """AdamW: added to the root of the mean of squared gradients."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW: decoupled weight decay."""
    decayed_parameters: Literal["matrices", "all"] = "matrices"
    """What weight decay acts on: kernels and embeddings only, or biases and norms as well."""
    clipping_max_norm: Positive | None = None
    """Largest global norm of a step's gradient; a larger one is scaled down to it. null: off."""
    drop_rate: BelowOne = 0.0
    """Dropout after the embedding, on attention weights and on each sub-layer's output."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products; weights, sums and the loss stay float32."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the initial weights, of dropout and of shuffling."""
    deterministic: bool = False
    """Ask an accelerator for bit-reproducible operations (slower); a CPU always has them."""
    sharding: ShardingConfig | None = None
    """How devices share the work. null: data-parallel over this machine's devices (on a CPU one
    per core) where microbatch_size divides by them, else one device."""
    keep_checkpoints: CountOrAll = 3
    """How many of the latest checkpoints to keep, besides the best; -1 keeps all."""
    chart_style: Literal["plain", "hand-drawn"] = "plain"
    """Look of the charts."""
    lineage: Lineage | None = None
    """Written by `train.py --like`."""

    CHECKS = ("_microbatch_divides",)

    def _microbatch_divides(self) -> str | None:
        devices = self.sharding.data if self.sharding else -1
        if devices == -1 or self.microbatch_size % devices == 0:
            return None
        return (
            f"microbatch_size: {self.microbatch_size} does not divide by the {devices} devices of"
            f" sharding.data; {-(-self.microbatch_size // devices) * devices} would"
        )

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one global step."""
        return self.microbatch_size * self.gradient_accumulation_steps

    @property
    def datasets(self) -> dict[str, float]:
        """Each dataset's name with its weight in the mixture."""
        return self.dataset if isinstance(self.dataset, dict) else {self.dataset: 1.0}


class RunConfig(NamedTuple):
    """Both files of a run folder, checked."""

    model: ModelConfig
    train: TrainConfig


MODEL_FILE, TRAIN_FILE = "model.json", "train.json"
FILE_TYPES: dict[str, type[Config]] = {MODEL_FILE: ModelConfig, TRAIN_FILE: TrainConfig}


def load_run(run_folder: Path | str) -> RunConfig:
    """Read and check `model.json` and `train.json` of a run folder.

    Raises:
        UserError: with one line for each mistake in either file.
    """
    return _check(run_folder, dict.fromkeys(FILE_TYPES))


def check_texts(run_folder: Path | str, model_text: str, train_text: str) -> RunConfig:
    """As `load_run`, for texts that do not stand in the folder yet."""
    return _check(run_folder, {MODEL_FILE: model_text, TRAIN_FILE: train_text})


def _check(run_folder: Path | str, texts: dict[str, str | None]) -> RunConfig:
    configs: dict[str, Any] = {}
    mistakes: list[str] = []
    for name, text in texts.items():
        path = Path(run_folder) / name
        try:
            text = strict_json.read_text(path) if text is None else text
            configs[name] = strict_json.parse(text, path, FILE_TYPES[name], FILE_TYPES)
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError("\n".join(mistakes))
    return RunConfig(configs[MODEL_FILE], configs[TRAIN_FILE])


C = TypeVar("C", bound=Config)


def differences(old: C, new: C) -> dict[str, tuple[Any, Any]]:
    """The keys in which two configs differ, each with its old and its new value."""
    before, after = old.as_json(), new.as_json()
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def json_schema(config_type: type[Config]) -> str:
    """The JSON schema of a config file, as the text that stands under `schemas/`."""
    return json.dumps(config_type.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def _nearest_divisor(number: int, near: int) -> int:
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(divisors, key=lambda d: abs(d - near))


def reference_page() -> str:
    """Every key of both files with its type, default and meaning, as Markdown."""
    lines = [
        "# Configuration",
        "",
        "Every key of a run's two files. This page is written by `uv run config.py`.",
    ]
    for name, file_type in FILE_TYPES.items():
        lines += ["", f"## `{name}`", "", *_key_table(file_type)]
    lines += ["", "### `sharding`", "", *_key_table(ShardingConfig)]
    return "\n".join(lines) + "\n"


def _key_table(config_type: type[StrictModel]) -> list[str]:
    schema = config_type.model_json_schema()
    rows = ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    for key, entry in schema["properties"].items():
        default = json.dumps(entry["default"]) if "default" in entry else "needed"
        meaning = entry.get("description", "").replace("\n", " ")
        if key in getattr(config_type, "MAY_CHANGE", ()):
            meaning += " *May change between two starts of a run.*"
        rows.append(f"| `{key}` | {_allowed(entry)} | `{default}` | {meaning} |")
    return rows


def _allowed(entry: dict[str, Any]) -> str:
    """What a JSON schema's entry lets through, in words."""
    if alternatives := entry.get("anyOf") or entry.get("oneOf"):
        return " or ".join(_allowed(alternative) for alternative in alternatives)
    if "enum" in entry:
        return ", ".join(f"`{json.dumps(value)}`" for value in entry["enum"])
    if "const" in entry:
        return f"`{json.dumps(entry['const'])}`"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    told = {limit: entry[limit] for limit in limits if abs(entry.get(limit, 2**31)) < 2**31 - 1}
    words = [f"{limits[limit]} {value:,}" for limit, value in told.items()]
    return " ".join([entry.get("type", "object"), *words])


def write_generated_files(root: Path) -> None:
    """Bring the JSON schemas and the page of keys up to date."""
    for name, file_type in FILE_TYPES.items():
        path = root / "schemas" / name.replace(".json", ".schema.json")
        path.write_text(json_schema(file_type), encoding="utf-8")
    (root / "docs" / "configuration.md").write_text(reference_page(), encoding="utf-8")


if __name__ == "__main__":
    write_generated_files(Path(__file__).parent)
