"""Read a Hugging Face `config.json` key by key, so that no key goes unnoticed."""

import json
import re
from pathlib import Path
from typing import Any

from rungs.checkpointing.published import CONFIG_FILE
from rungs.common import strict_json
from rungs.common.errors import UserError

NO_EFFECT_KEYS = frozenset(
    re.findall(
        r"\w+",
        """
        _attn_implementation _commit_hash _name_or_path add_bos_token add_eos_token architectures
        attention_dropout attn_implementation attn_pdrop bad_words_ids begin_suppress_tokens
        bos_token_id cache_implementation decoder_start_token_id diversity_penalty do_sample dtype
        early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
        exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
        gradient_checkpointing hidden_dropout id2label initializer_range
        keys_to_ignore_at_inference label2id length_penalty max_length max_sequence_length
        min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels
        num_return_sequences output_attentions output_hidden_states output_router_logits
        output_scores pad_token_id prefix pretraining_tp problem_type remove_invalid_values
        repetition_penalty resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef
        router_jitter_noise sep_token_id summary_activation summary_first_dropout
        summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
        temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
        transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
        use_return_dict
        """,
    )
)
"""Keys that do not change what a forward pass computes: names, token ids, generation, training.
`pretraining_tp` splits a matmul into parts and adds them up again."""

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
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (False,),
}
"""Keys of features that Rungs does not support, with the values that turn the feature off. A family
that does support one of these keys takes it before this table is consulted."""

TEXT_KEYS_OUTSIDE = {
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
}
"""Keys beside `text_config` that apply to the language model too."""


class HFConfig:
    """The keys of a `config.json`. Records which of them were read, and collects errors.

    Attributes:
        values: the keys of the language model. In a vision model those of `text_config`.
        has_vision: whether the config has a `text_config`.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.has_vision = path, "text_config" in values
        self.model_type = str(values.get("model_type"))
        if self.has_vision:
            inner = values["text_config"] if isinstance(values["text_config"], dict) else {}
            outer = {key: values[key] for key in TEXT_KEYS_OUTSIDE & values.keys()}
            tied = {key: outer[key] for key in ("tie_word_embeddings",) if key in outer}
            values = outer | inner | tied
        self.values = values
        self.errors: list[str] = []
        self._unread = set(values) - NO_EFFECT_KEYS

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, and record it as read."""
        self._unread.discard(key)
        return self.values.get(key, default)

    def reject(self, key: str, allowed: str) -> None:
        """Add an error: the value of this key is not supported."""
        value = strict_json.format_value(self.values.get(key))
        self.errors.append(f"{self.path}: {key}: {value} is not supported; {allowed}")

    def ignore(self, keys: tuple[str, ...]) -> None:
        """Treat these keys as having no effect."""
        self._unread -= set(keys)

    def raise_errors(self) -> None:
        """Raise UserError with a line for each error and for each key that nothing has read."""
        for key in sorted(self._unread):
            if key not in SUPPORTED_VALUES:
                value, name = (
                    strict_json.format_value(self.values[key]),
                    strict_json.format_name(key),
                )
                self.errors.append(
                    f"{self.path}: {name}: unknown key (value {value}); if it does not change what"
                    f" the model computes, pass --ignore-key {name}"
                )
            elif self.values[key] not in SUPPORTED_VALUES[key]:
                allowed = " or ".join(map(strict_json.format_value, SUPPORTED_VALUES[key]))
                self.reject(key, f"must be {allowed}")
        if self.errors:
            raise UserError("\n".join(self.errors))


def read_hf_config(folder: Path) -> HFConfig:
    """Read the `config.json` of a folder; raises UserError if it is missing or unreadable."""
    path = folder / CONFIG_FILE
    try:
        values = json.loads(strict_json.read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: unreadable JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object {{…}}")
    return HFConfig(path, values)
