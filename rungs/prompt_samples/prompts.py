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
    """Check that the model can continue the prompts of its run, with the tokenizer at a place; see
    `load_tokenizer`. Raises UserError with a line for each prompt that is wrong."""
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
        shown, longest, size = repr(prompt[:40]), model.context_length, model.vocab_size
        if (count := len(tokens)) > longest:
            problem = f"{count} tokens, more than the model's context_length {longest}; shorten it"
            lines.append(f"{shown} has {problem}")
        elif (largest := max(tokens)) >= size:
            lines.append(f"{shown} has token id {largest}, but the model's vocab_size is {size}")
    if lines:
        raise UserError.at(place, lines)
