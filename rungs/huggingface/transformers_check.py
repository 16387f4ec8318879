"""Compare an imported model with transformers: hidden states and logits for random tokens, and the
token ids of texts in many scripts, special tokens and chats."""

import itertools
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rungs.checkpointing import load
from rungs.checkpointing.weights_file import WEIGHTS_FILE, Weights
from rungs.common.errors import RunFailure, UserError
from rungs.common.shown_text import align_columns
from rungs.config.model_config import ModelConfig
from rungs.data.text.chat_template import ChatTemplate
from rungs.data.text.messages import messages_of
from rungs.data.text.tokenizer import TOKENIZER_FILE, Tokenizer
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.model.gpt import GPT

TOLERANCE = 1e-4
"""Largest difference of a token's vector, relative to its norm. Rounding gave 4e-6 in a Llama of
1.1B parameters; tanh GELU instead of exact GELU gives 2e-4, other mistakes far more."""
MIN_TOKENS, MAX_TOKENS = 64, 1040
"""Tokens to compare: more than the sliding window, if `MAX_TOKENS` allows."""
TEXTS = (
    "The quick brown fox can't jump over 12,345.67 lazy dogs; I'll see!",
    "def main(x):\n\tif x >= 0x1F:\n        return {'a': [x ** 2]}  # done\n\n\n",
    "   leading, trailing and   inner spaces   \t\r\n",
    "Straße, déjà vu, Łódź, İstanbul ıI, Ελληνικά: η γλώσσα. Русский: язык. Українська: її",
    "Cafe\u0301 and Café; ﬁne ½ ² № \u00a0no break\u200bzero width\ufeff",
    "עברית: שָׁלוֹם. العربية: اللُّغَةُ ١٢٣. हिन्दी: क्षत्रिय। தமிழ்: மொழி ไทย: ภาษา መ ენა",
    "中文：我喜欢读书，２０２４年。日本語：私は学生です。ｶﾅ 한국어: 언어를 배웁니다",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇳 👍🏽 😀😀 𝕌𝕟𝕚 𐍈 \x00\x07\x1b[0m \x7f \u2028 \ufffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0000000000000000000000000000",
    "<s></s><unk> [INST] <|endoftext|> <bos> <|im_start|>user",
    "",
)
_TURNS = (
    {"role": "user", "content": "Who wrote Ἰλιάς, and when?"},
    {"role": "assistant", "content": "Homer, they say.\n\nAbout 800 BC."},
    {"role": "user", "content": "  Thanks! 谢谢 "},
)
CHATS = (_TURNS[:1], _TURNS, ({"role": "system", "content": "Be brief."}, *_TURNS))


class DivergenceError(Exception):
    """The import computes something else than transformers. The message says from where on."""


def require_transformers(python: str) -> None:
    """Raise UserError if a Python lacks transformers or PyTorch."""
    probe = [python, "-c", "import torch, transformers"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"--python {python}: cannot be started: {error.strerror}") from None
    if done.returncode:
        cause = (done.stderr.strip() or "it was killed").splitlines()[-1]
        raise UserError(
            f"--check needs a Python with PyTorch and transformers, which {python} doesn't have"
            f" ({cause}); name one with --python, or install them: uv pip install --torch-backend"
            " cpu torch transformers"
        )


def compare(source: Path, imported: Path, python: str, echo: Callable[[str], None]) -> None:
    """Compare a Hugging Face model with its import, one of them at a time in memory. `python` has
    PyTorch and transformers. Raises RunFailure if transformers can't run it, DivergenceError, which
    names the first difference, if the results differ."""
    has_tokenizer = (imported / TOKENIZER_FILE).is_file()
    tokenizer = load_tokenizer(imported) if has_tokenizer else None
    tokens_S = sample_tokens(Weights(imported / WEIGHTS_FILE).header.model)
    answers = ask_transformers(source, tokens_S, tokenizer, python)
    _compare_activations(imported, tokens_S, answers, echo)
    if tokenizer is not None:
        ids = json.loads(str(answers["ids"]))
        chats = sum(each is not None for each in ids["chats"])
        echo(f"compared the ids of {len(ids['texts'])} texts and {chats} chats")
        for line in differences(tokenizer, ChatTemplate.find(imported), ids):
            raise DivergenceError(f"the tokenizer diverges from transformers: {line}")
    echo(f"agrees with transformers: no difference is above {TOLERANCE:g}")


def sample_tokens(model: ModelConfig) -> np.ndarray:
    """Return random token ids for the comparison, tokens_S."""
    wanted = min((model.sliding_window or 0) + MIN_TOKENS, MAX_TOKENS)
    length = min(wanted, model.context_length)
    return np.random.default_rng(0).integers(model.vocab_size, size=length, dtype=np.int32)


def ask_transformers(
    source: Path, tokens_S: np.ndarray, tokenizer: Tokenizer | None, python: str
) -> dict[str, np.ndarray]:
    """Return what transformers computes, as `transformers_program.py` writes it. Without a
    tokenizer, no texts are encoded."""
    special = tokenizer.special_ids if tokenizer else ()
    texts = [*TEXTS, *(f"a {tokenizer.decode([n])}b" for n in sorted(special))] if tokenizer else []
    with tempfile.TemporaryDirectory() as folder:
        asked, result = Path(folder, "asked.json"), Path(folder, "result.npz")
        content = {"tokens": tokens_S.tolist(), "texts": texts, "chats": CHATS}
        asked.write_text(json.dumps(content), encoding="utf-8")
        program = Path(__file__).with_name("transformers_program.py")
        command = [python, *map(str, (program, source.resolve(), asked, result))]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            cause = (done.stderr.strip() or "killed, perhaps for lack of memory").splitlines()[-1]
            raise RunFailure(f"could not be checked, because transformers failed: {cause}")
        with np.load(result) as found:
            return dict(found)


@nnx.jit
def _forward(model: GPT, tokens_BS: Any) -> Any:
    return model.forward(tokens_BS, keep_hidden_states=True)


def _compare_activations(
    imported: Path,
    tokens_S: np.ndarray,
    answers: dict[str, np.ndarray],
    echo: Callable[[str], None],
) -> None:
    with jax.default_matmul_precision("highest"):  # accelerators may round float32 inputs
        found = _forward(load.load_model(imported), jnp.asarray(tokens_S)[None])
    expected = [*answers["hidden_states"], answers["logits"]]
    names = ["embedding", *(f"block {number}" for number in range(len(expected) - 2)), "logits"]
    ours = [np.asarray(x_BSD[0]) for x_BSD in (*found.hidden_states, found.logits_BSV)]
    errors = dict(zip(names, map(relative_difference, ours, expected), strict=True))
    echo(f"largest relative difference from transformers on {len(tokens_S)} tokens:")
    echo(align_columns([(f"  {name}", f"{error:.1e}") for name, error in errors.items()]))
    same_S = ours[-1].argmax(axis=-1) == expected[-1].argmax(axis=-1)
    echo(f"the most likely next token is the same after {same_S.sum()} of {len(same_S)} tokens")
    for name, error in errors.items():
        if not error <= TOLERANCE:  # as a NaN isn't
            raise DivergenceError(f"diverges from transformers at {name} ({error:.1e})")


def relative_difference(found_SD: np.ndarray, expected_SD: np.ndarray) -> float:
    """Return the length of the difference, relative to the expected vector, of the worst token."""
    expected_SD = expected_SD.astype(np.float64)
    lengths_S = np.maximum(np.linalg.norm(expected_SD, axis=-1), 1e-30)
    return float((np.linalg.norm(found_SD - expected_SD, axis=-1) / lengths_S).max())


def differences(
    tokenizer: Tokenizer, template: ChatTemplate | None, ids: dict[str, list[Any]]
) -> Iterator[str]:
    """Yield a line for each text or chat that has other ids in transformers."""
    triples: list[tuple[str, list[int] | None, list[int] | None]] = []
    for text, plain, whole in zip(ids["texts"], ids["plain"], ids["whole"], strict=True):
        prompt = [*tokenizer.encode_prompt(text), *tokenizer.template_end]
        triples.append((repr(text), tokenizer.encode(text), plain))
        triples.append((f"{text!r}, with what begins and ends it,", prompt, whole))
    for chat, theirs in zip(CHATS, ids["chats"], strict=True):
        try:
            text = template and template.render(messages_of(list(chat)), add_generation_prompt=True)
        except UserError:
            text = None
        ours = None if text is None else tokenizer.encode(text)
        triples.append((f"a chat of {len(chat)} messages", ours, theirs))
    for what, ours, theirs in triples:
        if ours != theirs:
            pairs = itertools.zip_longest(ours or [], theirs or [])
            place = next((at for at, (one, other) in enumerate(pairs) if one != other), 0)
            here, there = (ids and ids[place : place + 5] for ids in (ours, theirs))
            yield f"{what} is {here} from token {place} on, in transformers {there}"
