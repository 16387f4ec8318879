"""The table of all families of models that Rungs imports and exports.

    family    the `Family` class: config keys and tensor names, used for import and for export
    gpt2      GPT-2
    llama     Llama, Mistral, Mixtral, Qwen 2, Qwen 3 with experts or without, SmolLM3, OLMo 2 and 3
    gemma     Gemma 1, 2 and 3
    gpt_oss   GPT-OSS
    deepseek  DeepSeek-V2 and V3
    hybrid    Qwen3-Next, Qwen3.5, Olmo Hybrid

To add a family, add it to `FAMILIES`; CONTRIBUTING.md has the steps. If its norm placement, bias
or activation isn't a key of `config/model_config.py`, the key comes first, with `model/blocks.py`
or `model/attention.py`."""

from rungs.common import errors, strict_json
from rungs.huggingface.config_keys import HFConfig
from rungs.huggingface.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from rungs.huggingface.families.family import Family
from rungs.huggingface.families.gemma import GEMMA, GEMMA2, GEMMA3
from rungs.huggingface.families.gpt2 import GPT2
from rungs.huggingface.families.gpt_oss import GPT_OSS
from rungs.huggingface.families.hybrid import OLMO_HYBRID, QWEN3_5, QWEN3_NEXT
from rungs.huggingface.families.llama import (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMO3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
)

FAMILIES = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, MIXTRAL, GPT2),
        *(QWEN3_MOE, OLMO2, OLMO3, SMOLLM3, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3),
        *(QWEN3_NEXT, QWEN3_5, OLMO_HYBRID),
    )
}
"""Families by model type. Export uses the first that can express a model, so order matters."""
VISION_MODELS = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
"""Model types of vision models, with the family of their language model."""


def family_of(hf_config: HFConfig) -> Family:
    """Return the family of a model. Raises UserError if it is not supported."""
    name = hf_config.model_type
    if name in VISION_MODELS and not hf_config.has_vision:
        raise errors.UserError(f"{hf_config.path}: text_config: missing; {name} needs it")
    if name in FAMILIES and hf_config.has_vision:
        raise errors.UserError(
            f"{hf_config.path}: text_config: a {name} has none; of models with one,"
            f" {', '.join(VISION_MODELS)} is supported"
        )
    if name in VISION_MODELS or name in FAMILIES:
        return FAMILIES[VISION_MODELS.get(name, name)]
    known = ", ".join(sorted({*FAMILIES, *VISION_MODELS}))
    raise errors.UserError(
        f"{hf_config.path}: model_type: {strict_json.format_value(name)} is not supported;"
        f" supported are {known}"
    )
