"""All families of published models that Rungs reads and writes."""

from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.huggingface.config_keys.hf_config import PublishedConfig
from rungs.huggingface.families.family import Family
from rungs.huggingface.families.gemma import GEMMA, GEMMA2, GEMMA3
from rungs.huggingface.families.gpt2 import GPT2
from rungs.huggingface.families.llama import LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3

FAMILIES = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, MIXTRAL, GPT2)
}
WITH_VISION = {"gemma3": "gemma3_text"}
"""Models of text and images whose text part is of a family."""


def family_of(published: PublishedConfig) -> Family:
    """The family of a published model; raises UserError where it is none of ours."""
    name = published.model_type
    if name in WITH_VISION and not published.has_vision:
        raise UserError(f"{published.path}: text_config: missing; {name} needs it")
    if name in WITH_VISION or (name in FAMILIES and not published.has_vision):
        return FAMILIES[WITH_VISION.get(name, name)]
    known = ", ".join(sorted({*FAMILIES, *WITH_VISION}))
    raise UserError(
        f"{published.path}: model_type: {strict_json.format_value(name)} is not supported;"
        f" supported are {known}"
    )
