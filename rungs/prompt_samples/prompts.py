"""The `sample_prompts` of a run as token ids."""

from collections.abc import Sequence
from pathlib import Path

from rungs.common.errors import UserError
from rungs.config.run_config import AnyRunConfig
from rungs.data.chats.chat_template import ChatTemplate
from rungs.data.chats.messages import Message
from rungs.data.tokenizer import Tokenizer
from rungs.data.tokenizer_files import load_tokenizer


def encode_prompts(
    prompts: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[list[int]]:
    """Return the token ids of each prompt: a text, or a user's message if the model is trained on
    chats and so has a template. Raises UserError if a prompt is not valid, or empty although no
    token begins a text."""
    if template is None:
        return [tokenizer.encode_beginning(prompt) for prompt in prompts]
    return [
        tokenizer.encode(template.render([Message("user", prompt)], add_generation_prompt=True))
        for prompt in prompts
    ]


def check_sample_prompts(config: AnyRunConfig, tokenizer: Path | str) -> None:
    """Check that the model can continue the prompts of its run. Raises UserError with a line for
    each prompt that is wrong.

    Args:
        tokenizer: where it is; see `load_tokenizer`.
    """
    prompts, model = config.train.sample_prompts, config.model
    if not prompts:
        return
    place, lines = f"{config.train_file}: sample_prompts", []
    try:
        # a dataset of chats has the template beside the tokenizer
        template = ChatTemplate.find(tokenizer.parent) if isinstance(tokenizer, Path) else None
        rows = encode_prompts(prompts, load_tokenizer(tokenizer), template)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    for prompt, tokens in zip(prompts, rows, strict=True):
        if len(tokens) > model.context_length:
            lines.append(
                f"{place}: {prompt[:40]!r} has {len(tokens)} tokens, more than the model's"
                f" context_length {model.context_length}; shorten it"
            )
        elif max(tokens) >= model.vocab_size:
            lines.append(
                f"{place}: {prompt[:40]!r} has token id {max(tokens)}, but the model's vocab_size"
                f" is {model.vocab_size}"
            )
    if lines:
        raise UserError("\n".join(lines))
