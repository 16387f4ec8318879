"""From texts to the texts that continue them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jax.typing import DTypeLike

from rungs.checkpointing.load import find_weights, load_token_generator, load_tokenizer
from rungs.checkpointing.published import all_stop_tokens
from rungs.checkpointing.weights_file import Weights
from rungs.data.tokenizer import Tokenizer
from rungs.model.generation import Generator, Request
from rungs.model.sampling import GREEDY, Sampling
from rungs.model.weight_formats import WeightFormat


class TextGenerator(NamedTuple):
    """A model that continues texts, which begin and end as those that it was trained on."""

    generator: Generator
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    """Each of them ends a text."""

    def continue_texts(
        self, texts: Sequence[str], new_tokens: int, sampling: Sampling = GREEDY, seed: int = 0
    ) -> list[str]:
        """Return the continuation of each text, of at most `new_tokens` tokens.

        Args:
            sampling: with `stop_tokens` of its own, or the model's.

        Raises:
            UserError: a text is not valid Unicode, or empty although no token begins texts.
        """
        prompts = [self.tokenizer.encode_beginning(text) for text in texts]
        stops = sampling.stop_tokens or self.stop_tokens
        request = Request(new_tokens, sampling._replace(stop_tokens=stops), seed)
        continued = self.generator.generate(prompts, request)
        pairs = zip(prompts, continued, strict=True)
        return [continuation(self.tokenizer, prompt, new) for prompt, new in pairs]


def load_generator(
    path: Path | str,
    compute_dtype: DTypeLike = "float32",
    weight_format: WeightFormat = "dtype",
) -> TextGenerator:
    """Return a trained model that continues texts; arguments and errors as for
    `load_token_generator` and `load_tokenizer`."""
    tokenizer = load_tokenizer(path)
    stops = all_stop_tokens(Weights(find_weights(path)), tokenizer)
    generator = load_token_generator(path, compute_dtype, weight_format)
    return TextGenerator(generator, tokenizer, stops)


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of the new tokens: a tokenizer may drop a space at the start of a text, and
    characters may be split between tokens."""
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(new, skip_special_tokens=True)
