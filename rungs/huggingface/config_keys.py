"""A Hugging Face `config.json`, with a check that every key is read, and the common kinds of keys.
A null key counts as absent. Each kind maps to `model.json` keys and back: `read` takes keys from an
`HFConfig`; `write` returns them for a `ModelConfig` in normal form, under the names of transformers
4, which transformers 5 reads as well."""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from rungs.common import errors, strict_json
from rungs.config.model_config import ModelConfig
from rungs.data.text.tokenizer_files import MODEL_CONFIG_FILE

_NO_EFFECT_KEYS = re.findall(
    r"\S+",
    """
    architectures _auto_class base_model_*_plan _commit_hash distributed_config finetuning_task
    _flash_attn_2_enabled _from_model_config gradient_checkpointing ignore_keys_at_rope_validation
    *_implementation *_implementation_autoset *_implementation_internal is_llama_config
    _is_quantized keys_to_ignore_at_inference max_seq_length max_sequence_length model_max_length
    model_name model_type *name_or_path peft_version prefix pretraining_tp task_specific_params
    tie_last_hidden_states tokenizer_* torchscript transformers.js_config transformers_version
    transformers_weights trl_version unsloth_* use_bfloat16 use_flash_attention* use_flash_attn
    xla_device

    add_bos_token add_eos_token *_token_id *_token_ids *_token_index

    assistant_* bad_words_ids begin_suppress_tokens cache_config cache_implementation compile_config
    constraints continuous_batching_config disable_compile diversity_penalty do_sample dola_layers
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty force_words_ids forced_decoder_ids generation_config
    generation_kwargs guidance_scale is_assistant length_penalty low_memory max_cache_len max_length
    max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states output_logits
    output_router_logits output_scores penalty_alpha prefill_chunk_size prompt_lookup_num_tokens
    remove_invalid_values renormalize_logits repetition_penalty return_dict return_dict_in_generate
    return_legacy_cache sequence_bias speculation_type stop_strings suppress_tokens
    target_lookbehind temperature token_healing top_h top_k top_p typical_p use_cache use_mtp
    use_return_dict watermarking_config

    *_dropout *_dropout_prob dtype hidden_dropout id2label initializer_range label2id loss_type
    num_labels *_pdrop problem_type router_aux_loss_coef router_jitter_noise summary_*
    tf_legacy_loss torch_dtype
    """,
)
"""Keys that do not affect the forward pass (`*` is a wildcard): names and implementations, token
ids, generation, training. transformers 4 and 5 have most in every config (`PretrainedConfig`,
`GenerationConfig`). `pretraining_tp` splits a matmul into parts and adds them up again."""

SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "auto_map": (None,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (None, 1),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (False,),
    "use_sliding_window": (None, False),
}
"""Keys of features that Rungs does not support, with the values that turn them off. A family that
supports such a key reads it before this table is consulted."""

TEXT_KEYS_OUTSIDE = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("quantization_config", "tie_word_embeddings"),
}
"""Keys beside `text_config` that also apply to the language model."""


def has_no_effect(key: str) -> bool:
    """Whether a key, in any family, does not affect the forward pass."""
    return any(fnmatchcase(key, pattern) for pattern in _NO_EFFECT_KEYS)


class HFConfig:
    """The keys of a `config.json`. Records which of them were read, and collects errors."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.has_vision = path, "text_config" in values
        self.model_type = str(values.get("model_type"))
        if self.has_vision:
            inner = values["text_config"] if isinstance(values["text_config"], dict) else {}
            outer = {key: values[key] for key in TEXT_KEYS_OUTSIDE & values.keys()}
            tied = {key: outer[key] for key in ("tie_word_embeddings",) if key in outer}
            values = outer | inner | tied
        self.values = values
        """The language model's keys; in a vision model, those of `text_config`."""
        self.taken: dict[str, Any] = {}
        """Keys read so far with their values, defaults included."""
        self.errors: list[str] = []
        given = (key for key, value in values.items() if value is not None)
        self._unread = {key for key in given if not has_no_effect(key)}

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, and record it as read."""
        self._unread.discard(key)
        self.taken[key] = self.values.get(key, default)
        return self.taken[key]

    def reject(self, key: str, allowed: str) -> None:
        """Add the error that this key's value is not supported."""
        value = strict_json.format_value(self.values.get(key))
        self.errors.append(f"{self.path}: {key}: {value} is not supported; {allowed}")

    def ignore(self, keys: Iterable[str]) -> None:
        """Mark these keys as having no effect."""
        self._unread -= set(keys)

    def raise_errors(self, supported: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise UserError with a line for each error, and for each unread key, except those of
        `SUPPORTED_VALUES` and `supported` with such a value."""
        supported = {**SUPPORTED_VALUES, **supported}
        for key in sorted(self._unread):
            if key not in supported:
                value = strict_json.format_value(self.values[key])
                name = strict_json.format_name(key)
                self.errors.append(
                    f"{self.path}: {name}: unknown key (value {value}); if it does not change what"
                    f" the model computes, pass --ignore-key {name}"
                )
            elif self.values[key] not in supported[key]:
                allowed = " or ".join(map(strict_json.format_value, supported[key]))
                self.reject(key, f"must be {allowed}")
        if self.errors:
            raise errors.UserError("\n".join(self.errors))


def read_hf_config(folder: Path) -> HFConfig:
    """Read a folder's `config.json`. Raises UserError if it is missing or unreadable."""
    path = folder / MODEL_CONFIG_FILE
    text = strict_json.read_text(path)
    with errors.errors_at(f"{path}: unreadable JSON: ", ValueError, RecursionError):
        values = json.loads(text)
    if not isinstance(values, dict):
        raise errors.UserError(f"{path}: must hold a JSON object {{…}}")
    return HFConfig(path, values)


Values = dict[str, Any]


class Key(Protocol):
    """One or several `config.json` keys that belong together."""

    def read(self, hf_config: HFConfig) -> Values:
        """Return the corresponding `model.json` keys."""

    def write(self, model: ModelConfig, /) -> Values:
        """Return the `config.json` keys for a model."""


def _value_of(model: ModelConfig, key: str) -> Any:
    """Return the value of a key, None if its object is not there."""
    start: Any = model
    return functools.reduce(lambda of, name: getattr(of, name, None), key.split("."), start)


@dataclass(frozen=True)
class SameValue:
    """One key with the same value under two names."""

    hf_key: str
    key: str
    """In `model.json`; "outer.inner" is in an object there."""
    default: Any = None
    """Default in transformers."""
    is_integer: bool = False
    """Whether `config.json` has an integer and `model.json` a float."""
    newer_key: str | None = None
    """What transformers 5 writes instead of `hf_key`, which it reads as well."""

    def read(self, hf_config: HFConfig) -> Values:
        newer = hf_config.take(self.newer_key) if self.newer_key else None
        value = hf_config.take(self.hf_key, self.default)
        return {self.key: value if newer is None else newer}

    def write(self, model: ModelConfig) -> Values:
        value = _value_of(model, self.key)
        return {self.hf_key: int(value) if self.is_integer and value is not None else value}


@dataclass(frozen=True)
class Flag:
    """One boolean of `config.json` for one or more keys of `model.json`."""

    hf_key: str
    keys: tuple[str, ...]
    default: bool

    def read(self, hf_config: HFConfig) -> Values:
        value = hf_config.take(self.hf_key)
        return dict.fromkeys(self.keys, self.default if value is None else value)

    def write(self, model: ModelConfig) -> Values:
        return {self.hf_key: any(getattr(model, key) for key in self.keys)}


@dataclass(frozen=True)
class Choice:
    """A string or a boolean, with other names in `model.json`."""

    hf_key: str
    key: str
    names: Mapping[Any, str]
    """From `config.json` to `model.json`. Of several names for one value, the first is written."""
    default: Any

    def read(self, hf_config: HFConfig) -> Values:
        value = hf_config.take(self.hf_key, self.default)
        value = self.default if value is None else value
        if isinstance(value, str | bool) and value in self.names:
            return {self.key: self.names[value]}
        hf_config.reject(self.hf_key, f"the values are {', '.join(map(str, self.names))}")
        return {}

    def write(self, model: ModelConfig) -> Values:
        value = _value_of(model, self.key)
        matches = [hf_value for hf_value, known in self.names.items() if known == value]
        return {self.hf_key: matches[0]} if matches else {}
