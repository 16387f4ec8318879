"""Reads, checks and compares the config files of a run folder: `model.json`, and `train.json` or
`reinforce.json`."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple

from typing_extensions import TypeVar

from rungs.common import plugins, shown_text, strict_json
from rungs.common.errors import UserError
from rungs.config.base import Config
from rungs.config.latent_config import LatentConfig
from rungs.config.model_config import ModelConfig, MupConfig, RopeScaling
from rungs.config.optimization_config import (
    ATTENTION_TARGETS,
    BUILT_IN_OPTIMIZERS,
    LearningRateMultipliers,
    LoraConfig,
    LoraTarget,
    OptimizationConfig,
)
from rungs.config.reinforce_config import SETTINGS, TRUST_FLAG, ReinforceConfig, TaskConfig
from rungs.config.routing_config import RoutingConfig
from rungs.config.sharding_config import ShardingConfig, indivisible
from rungs.config.train_config import Phase, TrainConfig

T = TypeVar("T", bound=OptimizationConfig, default=TrainConfig, covariant=True)
_KEYS_OF_OPTIMIZERS = {
    "beta1": ("adamw", "muon", "lion"),
    "beta2": ("adamw", "muon", "lion"),
    "group_beta2": ("adamw", "muon"),
    "epsilon": ("adamw", "muon"),
    "momentum": ("muon", "sgd"),
    "momentum_warmup_steps": ("muon",),
    "start_momentum": ("muon",),
    "orthogonalization": ("muon",),
    "normuon_beta2": ("muon",),
}
_KEYS_OF_SCHEDULES = {
    "decay_period_percent": ("warmup_stable_decay",),
    "min_learning_rate_percent": ("cosine", "linear", "warmup_stable_decay"),
}
_KEYS_OF_LAYERS = (
    *("n_heads", "n_kv_heads", "head_dim", "qkv_bias", "attention_output_bias", "rope_theta"),
    *("rope_scaling", "sliding_rope_theta", "sliding_window", "layer_pattern", "qk_norm"),
    *("query_pre_attn_scalar", "attention_soft_cap", "residual", "norm_placement", "feed_forward"),
    *("ffn_dim", "ffn_bias", "n_experts", "experts_per_token", "zero_init_residual"),
    *("normalize_expert_weights", "residual_scalars", "value_embedding_every", "qk_norm_scope"),
    *("latent_attention", "expert_routing", "shared_ffn_dim"),
    *("n_dense_layers", "dense_ffn_dim"),
    *("attention_sinks", "attention_output_gate", "delta_net", "rope_share"),
)
"""Keys of model.json that describe blocks."""
_KEYS_OF_NORMS = ("norm_placement", "norm_epsilon", "norm_parameters")
_KEYS_OF_BALANCE = ("load_balancing_weight", "balance_bias_rate")
_KEYS_OF_WINDOWS = ("sliding_window", "sliding_rope_theta")
Reason = tuple[Any, ...]
"""Whether something is so, in words, and the keys that then have no effect."""


class RunConfig(NamedTuple, Generic[T]):
    """The configs of a run: both files, checked."""

    model: ModelConfig
    train: T

    @property
    def sequence_length(self) -> int:
        """Tokens in a sequence, in training and in validation."""
        return self.train.sequence_length or self.model.context_length

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of one update, padding included, before batch_growth."""
        return self.train.sequences_per_step * self.sequence_length

    @property
    def most_tokens_per_step(self) -> int:
        """Input tokens of the largest update."""
        train = self.train
        return train.microbatches_per_step * train.microbatch_size * self.sequence_length

    def tokens_before(self, step: int) -> int:
        """Return the number of input tokens in all steps before one."""
        return self.train.sequences_before(step) * self.sequence_length

    def least_steps(self, tokens: int) -> int:
        """Return the fewest steps with this many tokens, within one epoch."""
        return self.train.steps_of(-(-tokens // self.sequence_length) - 1) + 1

    @property
    def train_file(self) -> str:
        """Name of the file that holds `train`."""
        return REINFORCE_FILE if isinstance(self.train, ReinforceConfig) else TRAIN_FILE

    @property
    def command(self) -> str:
        """How to call the command that trains the run."""
        return shown_text.command_line(self.train_file.removesuffix(".json"))

    @property
    def command_again(self) -> str:
        """How to call it for a run that has started, so whose code is trusted."""
        tasks = self.train.tasks if isinstance(self.train, ReinforceConfig) else []
        return self.command + f" {TRUST_FLAG}" * any(task.needs_trust for task in tasks)


AnyRunConfig = RunConfig[OptimizationConfig]
ReinforceRunConfig = RunConfig[ReinforceConfig]

MODEL_FILE, TRAIN_FILE, REINFORCE_FILE = "model.json", "train.json", "reinforce.json"
FILE_TYPES: dict[str, type[Config]] = {
    MODEL_FILE: ModelConfig,
    TRAIN_FILE: TrainConfig,
    REINFORCE_FILE: ReinforceConfig,
}
_SHARED: dict[str, type[strict_json.StrictModel]] = {
    "sharding": ShardingConfig,
    "lora": LoraConfig,
    "learning_rate_multipliers": LearningRateMultipliers,
}
NESTED: dict[str, dict[str, type[strict_json.StrictModel]]] = {
    MODEL_FILE: {
        "latent_attention": LatentConfig,
        "rope_scaling": RopeScaling,
        "mup": MupConfig,
        "expert_routing": RoutingConfig,
    },
    TRAIN_FILE: _SHARED | {"dataset": Phase},
    REINFORCE_FILE: {
        "tasks": TaskConfig,
        **{f'tasks.settings of "{name}"': settings for name, settings in SETTINGS.items()},
    },
}
"""Keys of each file that hold an object; those that both training files share are listed once."""

MUP_OPTIMIZERS = ("adamw", "muon")
"""Optimizers whose learning rates `optimizers.py` scales with the width in muP."""
SAMPLING_MODES = ("dp", "fsdp")
"""Sharding modes in which texts can be sampled."""


@contextlib.contextmanager
def errors_in_files_of(run: Path) -> Iterator[None]:
    """Raise a UserError with the run's folder before each line that begins with the name of one of
    its files."""
    try:
        yield
    except UserError as error:
        lines = [
            f"{run}/{line}" if line.partition(":")[0] in FILE_TYPES else line
            for line in str(error).split("\n")
        ]
        raise UserError("\n".join(lines)) from None


def load_run(run_folder: Path | str) -> RunConfig:
    """Read and check `model.json` and `train.json` of a run folder. Raises UserError with a line
    per error in either file or their combination, or if it is a reinforcement learning run."""
    return _load(Path(run_folder), TRAIN_FILE)


def load_reinforcement_run(run_folder: Path | str) -> ReinforceRunConfig:
    """Read and check `model.json` and `reinforce.json` of a run folder; see `load_run`."""
    return _load(Path(run_folder), REINFORCE_FILE)


def _load(folder: Path, train_file: str) -> Any:
    found = _train_file(folder)
    if found != train_file and (folder / found).exists():
        command = shown_text.command_line(found.removesuffix(".json"))
        raise UserError(
            f"{folder}: has a {found} and no {train_file}; to start it: {command}"
            f" {shown_text.quoted(folder)}"
        )
    return _check(folder, {MODEL_FILE: None, train_file: None})


def load_any_run(run_folder: Path | str) -> AnyRunConfig:
    """Read and check the two files of a run folder of either kind; see `load_run`."""
    folder = Path(run_folder)
    return _check(folder, dict.fromkeys(config_files(folder)))


def config_files(run_folder: Path) -> tuple[str, str]:
    """Return the names of a run folder's two config files. Raises UserError if it has three."""
    return MODEL_FILE, _train_file(run_folder)


def _train_file(folder: Path) -> str:
    if not (folder / REINFORCE_FILE).exists():
        return TRAIN_FILE
    if (folder / TRAIN_FILE).exists():
        raise UserError(
            f"{folder}: has both {TRAIN_FILE} and {REINFORCE_FILE}; a run has one of them, so move"
            " the other to another folder"
        )
    return REINFORCE_FILE


def check_texts(run_folder: Path | str, texts: dict[str, str]) -> AnyRunConfig:
    """Check both files' texts, by name, before they are written; see `load_run`."""
    return _check(Path(run_folder), dict(texts))


def parse_train(values: dict[str, Any]) -> OptimizationConfig:
    """Return a saved `train.json` or `reinforce.json`; raises pydantic's ValidationError."""
    kind = ReinforceConfig if "tasks" in values else TrainConfig
    return kind.model_validate(values)


def _check(folder: Path, texts: dict[str, str | None]) -> Any:
    model_file, train_file = texts
    types = {name: FILE_TYPES[name] for name in texts}
    configs: dict[str, Any] = {}
    errors: list[str] = []
    for name, text in texts.items():
        path = folder / name
        try:
            text = strict_json.read_text(path) if text is None else text
            configs[name] = strict_json.parse(text, path, types[name], types)
        except UserError as error:
            errors.append(str(error))
    if not errors:
        found: AnyRunConfig = RunConfig(configs[model_file], configs[train_file])
        if lines := list(conflicts(*found)):
            raise UserError.at(folder / train_file, lines)
        return found
    raise UserError("\n".join(errors))


def conflicts(model: ModelConfig, train: OptimizationConfig) -> Iterator[str]:
    """Yield a line "key of the second file: what is wrong" for each conflict between the two."""
    known = {*BUILT_IN_OPTIMIZERS, *plugins.plugin_names(plugins.OPTIMIZERS)}
    if train.optimizer not in known:
        yield f"optimizer: {plugins.unknown_name('optimizer', train.optimizer, known)}"
    if (train.sequence_length or 0) > model.context_length:
        yield (
            f"sequence_length: {train.sequence_length} is longer than the model's context_length;"
            f" at most {model.context_length}"
        )
    if train.sharding and train.sharding.mode == "cp":
        line = indivisible_sequence(model, train, train.sharding.sizes[1])
        yield from [line] if line else []
    if model.mup and train.optimizer not in MUP_OPTIMIZERS:
        yield (
            f'optimizer: "{train.optimizer}" is not supported with mup in model.json; use'
            f" {_either(MUP_OPTIMIZERS)}, or remove mup"
        )
    if model.mup and train.lora:
        yield "lora: not supported with mup in model.json; remove one of the two"
    multipliers = train.learning_rate_multipliers
    named: dict[str, Iterable[str]] = {
        "learning_rate_multipliers": multipliers.model_fields_set if multipliers else (),
        "group_schedules": train.group_schedules,
        "group_beta2": train.group_beta2,
    }
    for key, group in ((key, group) for key, groups in named.items() for group in groups):
        reason = ""
        if group == "head" and model.tied_embeddings:
            reason = "with tied_embeddings the head is the embedding"
        if group in ("residual_scale", "embedding_skip") and not model.residual_scalars:
            reason = "model.json has no residual_scalars"
        if (key, group, train.optimizer) == ("group_beta2", "matrices", "muon"):
            reason = "" if model.n_experts else "muon has no beta2 for kernels"
        if reason:
            yield f"{key}.{group}: {reason}; remove it"
    objective = train.objective if isinstance(train, TrainConfig) else None
    needs = ("masked_diffusion", "bidirectional", 0), ("multi_token", "prediction_module", 1)
    for name, key, offset in needs:
        if getattr(model, key) != (objective == name):
            yield f'objective: "{name}" and {key} in model.json need each other; set both or none'
        if objective == name and getattr(train, "target_offset", offset) != offset:
            yield f'target_offset: must be {offset} with objective "{name}"'
    if model.bidirectional and (train.sample_prompts or getattr(train, "benchmarks", ())):
        yield "sample_prompts and benchmarks: not supported with masked_diffusion; remove them"
    for target in train.lora.targets if train.lora else ():
        if missing := _missing_target(target, model):
            yield f"lora.targets: {target}: {missing}"
    if train.uses_float8 and not model.n_layers:
        yield 'matmul_dtype: "float8" is for layers, and the model has none; remove it'
    if train.uses_float8 and model.delta_net:
        yield 'matmul_dtype: "float8" is not supported with delta_net layers; remove it'
    if train.uses_float8 and model.n_experts:
        yield 'matmul_dtype: "float8" is not supported in a mixture of experts; remove it'
    if isinstance(train, ReinforceConfig):
        yield from _reinforcement_conflicts(model, train)


def indivisible_sequence(model: ModelConfig, train: OptimizationConfig, context: int) -> str | None:
    """Return why the sequence length does not fit this many devices along the context axis (-1:
    unknown), or None."""
    length = train.sequence_length or model.context_length
    return indivisible("sequence_length", length, abs(context), "context")


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _missing_target(target: LoraTarget, model: ModelConfig) -> str | None:
    """Return why the architecture lacks a LoRA target, None if it has it."""
    if not model.n_layers:
        return "the model has no layers"
    if target in ATTENTION_TARGETS:
        if set(model.layer_kinds()) == {"delta_net"}:
            return "no layer has attention"
        is_missing = model.latent_attention and target != "output"
        return "latent attention has no such projection; choose output" if is_missing else None
    if model.n_experts:
        return "not supported in a mixture of experts; choose from query, key, value and output"
    if model.feed_forward == "none" or (target == "gate" and not model.is_gated):
        return f'feed_forward "{model.feed_forward}" has none'
    return None


def _reinforcement_conflicts(model: ModelConfig, train: ReinforceConfig) -> Iterator[str]:
    length = train.sequence_length or model.context_length
    if train.max_new_tokens >= length:
        yield (
            f"max_new_tokens: {train.max_new_tokens} leaves no room for a prompt in a"
            f" sequence_length of {length}; at most {length - 1}"
        )
    if train.sharding and train.sharding.mode not in SAMPLING_MODES:
        yield (
            f'sharding.mode: "{train.sharding.mode}" is not supported in reinforcement learning;'
            f" use {_either(SAMPLING_MODES)}"
        )


C = TypeVar("C", bound=Config)


def differences(old: C, new: C) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two configs differ, with their old and new values."""
    before, after = old.as_json(), new.as_json()
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def unused_keys(config: AnyRunConfig, has_validation: bool = True) -> list[str]:
    """Return a line "file: key: …" for each key that is set to a value other than null but has no
    effect. `has_validation`: whether a dataset has a validation split, True if unknown."""
    model, train = config
    of_train = [*_in_optimization(model, train), *_in_objective(train, has_validation)]
    return [
        *_lines(MODEL_FILE, model, _in_model(model, train)),
        *_lines(config.train_file, train, of_train),
    ]


def _lines(file: str, config: Config, reasons: list[Reason]) -> list[str]:
    first: dict[str, str] = {}
    for applies, reason, *keys in reasons:
        for key in keys if applies else ():
            first.setdefault(key, reason)
    return [
        f"{file}: {key}: has no effect{reason}; remove it"
        for key, reason in first.items()
        if key in config.model_fields_set and getattr(config, key) is not None
    ]


def _in_model(model: ModelConfig, train: OptimizationConfig) -> list[Reason]:
    kinds, is_rope = set(model.layer_kinds()), model.positions == "rope"
    only_sliding = model.sliding_rope_theta and "global" not in kinds
    return [
        (not model.n_layers, " with n_layers 0", *_KEYS_OF_LAYERS),
        (not model.n_layers and is_rope, " with n_layers 0", "positions"),
        (model.norm == "none", ' with norm "none"', *_KEYS_OF_NORMS),
        (model.feed_forward == "none", ' with feed_forward "none"', "ffn_bias"),
        (not model.n_experts, " without n_experts", "normalize_expert_weights"),
        (not model.qk_norm, " without qk_norm", "qk_norm_scope"),
        (not model.n_dense_layers, " without n_dense_layers", "dense_ffn_dim"),
        (not is_rope, f' with positions "{model.positions}"', "rope_theta", "rope_share"),
        ("sliding" not in kinds, ", as no layer is sliding", *_KEYS_OF_WINDOWS),
        (only_sliding, ", as every layer has sliding_rope_theta", "rope_theta", "rope_scaling"),
        (train.start_from, " with start_from", "init", "zero_init_residual"),
    ]


def _in_optimization(model: ModelConfig, train: OptimizationConfig) -> list[Reason]:
    optimizer, schedule, decay = train.optimizer, train.schedule, train.weight_decay
    schedules = {schedule, *train.group_schedules.values()}
    is_built_in = optimizer in BUILT_IN_OPTIMIZERS
    has_bias = model.routing.balance_bias
    return [
        *(
            (is_built_in and optimizer not in having, f' with optimizer "{optimizer}"', key)
            for key, having in _KEYS_OF_OPTIMIZERS.items()
        ),
        *(
            (schedules.isdisjoint(having), f' with schedule "{schedule}"', key)
            for key, having in _KEYS_OF_SCHEDULES.items()
        ),
        (not train.warmup_period_percent, " without a warm-up", "start_learning_rate_percent"),
        (not decay, " with weight_decay 0", "decayed_parameters", "cautious_weight_decay"),
        (not decay, " with weight_decay 0", "weight_decay_schedule"),
        (not train.momentum_warmup_steps, " without momentum_warmup_steps", "start_momentum"),
        (not model.n_experts, " without n_experts in model.json", *_KEYS_OF_BALANCE),
        (has_bias, " with balance_bias in model.json", _KEYS_OF_BALANCE[0]),
        (not has_bias, " without balance_bias in model.json", _KEYS_OF_BALANCE[1]),
        (not model.n_layers, " with n_layers 0", "remat", "scan_unroll", "watch_interval"),
    ]


def _in_objective(train: OptimizationConfig, has_validation: bool) -> list[Reason]:
    if isinstance(train, ReinforceConfig):
        is_once = train.updates_per_rollout == 1 and not train.staleness
        return [
            (is_once, " with updates_per_rollout 1 and staleness 0", "clip_low", "clip_high"),
            (train.loss == "cispo", ' with loss "cispo"', "clip_low"),
            (train.staleness > 0, " with staleness 1", "max_sampler_ratio"),
            (train.teacher is None, " without a teacher", "teacher_coefficient"),
        ]
    assert isinstance(train, TrainConfig)
    objective, is_random = f' with objective "{train.objective}"', train.has_random_windows
    uses_seed = not train.start_from or train.drop_rate or train.shuffle or is_random or train.lora
    uses_seed = uses_seed or train.objective == "masked_diffusion"
    no_seed = " with start_from and neither dropout nor shuffle nor lora"
    of_teacher = "teacher_temperature", "teacher_top_k", "hard_target_weight"
    return [
        (not has_validation, " without a validation split", "validation_tokens", "start_val_token"),
        (not uses_seed, no_seed, "seed"),
        (is_random, ' with windows "random"', "shuffle"),
        (train.objective != "distill", objective, *of_teacher),
        (not train.learns_preferences, objective, "beta"),
        (train.objective != "simpo", objective, "simpo_gamma"),
        (train.objective != "kto", objective, "desirable_weight", "undesirable_weight"),
        (train.objective != "multi_token", objective, "multi_token_weight"),
    ]
