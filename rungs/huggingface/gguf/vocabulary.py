"""A tokenizer in the metadata of a GGUF file: of type `gpt2`, BPE over bytes with a named way to
split texts, or `llama`, SentencePiece's BPE, which merges the pair with the best score
(llama.cpp's `src/llama-vocab.cpp`)."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from rungs.common import paths
from rungs.common.errors import UserError, errors_at
from rungs.data import tokenizer_files
from rungs.data.chats.chat_template import TEMPLATE_FILE, ChatTemplate
from rungs.data.sentencepiece_model import Piece, SentencePieceModel
from rungs.data.tokenizer import LARGEST_VOCAB, TOKENIZER_FILE, Tokenizer, library_errors
from rungs.huggingface.hf_tokenizer import write_json

Metadata = dict[str, Any]

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Special tokens, with their names in transformers."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2, _LLAMA3, _QWEN2 = "gpt-2", "llama-bpe", "qwen2"
_PATTERNS = {_LLAMA3: _WORDS + "{1,3}" + _REST, _QWEN2: _WORDS + _REST}
"""How texts are split before merges, by llama.cpp's names; GPT-2's way is part of ByteLevel."""
_PROBE = "a  b ﬁ e\u0301 "
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_UNUSED, _UNKNOWN = "[PAD{}]", "<unk>"


# Export


def to_metadata(
    folder: Path, stops: tuple[int, ...], vocab_size: int
) -> tuple[Metadata, list[str]]:
    """Return the metadata of an exported model's tokenizer and chat template, and notes on what
    llama.cpp does in another way. `stops` end a generated text. Raises UserError if llama.cpp has
    no such tokenizer."""
    if not paths.is_file(folder / TOKENIZER_FILE):
        return {f"{_PREFIX}model": "none"}, []
    tokenizer = tokenizer_files.load_tokenizer(folder)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"needs a model that has all of the tokenizer's {tokenizer.vocab_size} tokens, and this"
            f" one has {vocab_size}"
        )
    content = json.loads(tokenizer.as_json())
    if content["model"]["type"] != "BPE":
        raise UserError(f"has no tokenizer of type {content['model']['type']}")
    pieces = _pieces(content, vocab_size)
    is_spm = content["model"]["byte_fallback"]
    keys, notes = (_spm_keys if is_spm else _bpe_keys)(content, pieces)
    special = tokenizer_files.special_tokens(tokenizer_files.finder(folder))
    ids = {piece.text: number for number, piece in enumerate(pieces)}
    keys |= {
        f"{name}_token_id": ids[special[f"{theirs}_token"]]
        for name, theirs in _NAMED.items()
        if special.get(f"{theirs}_token") in ids
    }
    keys |= dict(zip(_STOPS, stops, strict=False))
    keys |= dict(zip(("bos_token_id",), tokenizer.begin, strict=False))
    keys |= {
        "tokens": [piece.text for piece in pieces],
        "token_type": [piece.kind for piece in pieces],
        "add_bos_token": bool(tokenizer.begin),
        "add_eos_token": False,
    }
    template = ChatTemplate.find(folder)
    named = {_PREFIX + key: value for key, value in keys.items()}
    return named | ({_TEMPLATE: template.source} if template else {}), notes


def _pieces(content: Metadata, size: int) -> list[Piece]:
    """Return the tokens by id, those of SentencePiece with scores."""
    model = content["model"]
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(model["merges"]):
        scores.setdefault(left + right, -float(rank))
    kinds = dict.fromkeys(model["vocab"].values(), TokenType.NORMAL)
    texts = {number: text for text, number in model["vocab"].items()}
    for token in content["added_tokens"]:
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        texts[token["id"]] = token["content"]
    if model["byte_fallback"]:
        for number, text in texts.items():
            if text == (model["unk_token"] or _UNKNOWN):
                kinds[number] = TokenType.UNKNOWN
            elif kinds[number] == TokenType.NORMAL and _BYTE.fullmatch(text):
                kinds[number] = TokenType.BYTE
            elif kinds[number] == TokenType.USER_DEFINED:
                texts[number] = text.replace("▁", " ")
    return [
        Piece(
            texts.get(number, _UNUSED.format(number)),
            scores.get(texts.get(number, ""), 0.0),
            int(kinds.get(number, TokenType.UNUSED)),
        )
        for number in range(size)
    ]


def _bpe_keys(content: Metadata, pieces: list[Piece]) -> tuple[Metadata, list[str]]:
    del pieces
    model, normalizer = content["model"], content["normalizer"]
    split = next((n for n in (_GPT2, *_PATTERNS) if _splits_like(content, n)), None)
    if split is None or model["ignore_merges"] != (split == _LLAMA3):
        raise UserError("does not split texts as the tokenizer does")
    notes = []
    if normalizer == {"type": "NFC"}:
        notes = ["llama.cpp does not compose accents (NFC) before it splits a text into tokens"]
    elif normalizer is not None:
        raise UserError(f"lacks the tokenizer's normalizer, {normalizer['type']}")
    merges = [" ".join(pair) for pair in model["merges"]]
    return {"model": "gpt2", "pre": split, "merges": merges}, notes


def _splits_like(content: Metadata, split: str) -> bool:
    expected = json.loads(_byte_level(models.BPE(), split).to_str())["pre_tokenizer"]
    return _without_offsets(content["pre_tokenizer"]) == _without_offsets(expected)


def _without_offsets(part: Any) -> Any:
    """Return a pre-tokenizer without the key that only moves offsets."""
    if isinstance(part, dict):
        return {k: _without_offsets(v) for k, v in part.items() if k != "trim_offsets"}
    return [_without_offsets(each) for each in part] if isinstance(part, list) else part


def _spm_keys(content: Metadata, pieces: list[Piece]) -> tuple[Metadata, list[str]]:
    raw = tokenizers.Tokenizer.from_str(json.dumps(content))
    marked = _PROBE.replace(" ", "▁")
    found = _before_merges(raw, _PROBE)
    prefix = next((prefix for prefix in ("", "▁") if found == f"{prefix}{marked}"), None)
    if prefix is None or not any(piece.kind == TokenType.UNKNOWN for piece in pieces):
        raise UserError("does not handle spaces as the tokenizer does")
    normal = {piece.text for piece in pieces if piece.kind == TokenType.NORMAL}
    merges = [(a, b) for a, b in content["model"]["merges"] if {a, b, a + b} <= normal]
    expected = SentencePieceModel(pieces, True, None, None, bool(prefix), False)
    if set(merges) != set(expected.merges()) or _results(merges) != _results(expected.merges()):
        raise UserError("merges by score, and no scores give the tokenizer's merges")
    special = next((piece.text for piece in pieces if piece.kind == TokenType.CONTROL), "")
    theirs = expected.to_tokenizer(prefix_after_special_tokens=True)
    notes = [
        f"llama.cpp adds a space also {where}"
        for where, probe in {
            "before a text that begins with one": " a",
            "after special tokens in a text": f"{special}a",
        }.items()
        if prefix and raw.encode(probe).tokens[-2:] != theirs.encode(probe).tokens[-2:]
    ]
    return {
        "model": "llama",
        "pre": "default",
        "scores": [piece.score for piece in pieces],
        "add_space_prefix": bool(prefix),
    }, notes


def _before_merges(raw: tokenizers.Tokenizer, text: str) -> str | None:
    """Return a text as merges see it, None if it is split before."""
    text = raw.normalizer.normalize_str(text) if raw.normalizer else text
    parts = raw.pre_tokenizer.pre_tokenize_str(text) if raw.pre_tokenizer else [(text, ())]
    return parts[0][0] if len(parts) == 1 else None


def _results(merges: list[tuple[str, str]]) -> list[str]:
    """Return what the merges make, in order; several in a row that make the same count once."""
    return [result for result, _ in itertools.groupby(a + b for a, b in merges)]


# Import


def write_files(metadata: Metadata, folder: Path) -> None:
    """Write a file's tokenizer, chat template and the tokens that end a text into a folder. Raises
    UserError if the tokenizer is damaged, or of a kind that is not supported."""
    found = {k.removeprefix(_PREFIX): v for k, v in metadata.items() if k.startswith(_PREFIX)}
    kind = found.get("model", "none")
    if kind in ("none", "no_vocab"):
        return
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{_PREFIX}model: {kind!r} is not supported; supported are gpt2 and llama")
    with errors_at("", KeyError, TypeError, IndexError, AttributeError), library_errors("damaged"):
        pieces = _read_pieces(found)
        raw = (_read_spm if kind == "llama" else _read_bpe)(found, pieces)
        ids = {name: found.get(f"{name}_token_id") for name in _NAMED}
        names = {name: pieces[number].text for name, number in ids.items() if number is not None}
        if found.get("add_bos_token", kind == "llama" or found.get("pre") == _LLAMA3):
            begin = names["bos"]
            raw.post_processor = processors.TemplateProcessing(
                [begin, "$A"], special_tokens=[(begin, ids["bos"])]
            )
    Tokenizer(raw).save(folder / TOKENIZER_FILE)
    config = {f"{_NAMED[name]}_token": text for name, text in names.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / tokenizer_files.CONFIG_FILE, config)
    stops = [found[key] for key in _STOPS if found.get(key) is not None]
    if stops:
        keys = {"eos_token_id": stops if stops[1:] else stops[0], "bos_token_id": ids["bos"]}
        write_json(folder / tokenizer_files.GENERATION_FILE, keys)
    if template := metadata.get(_TEMPLATE):
        (folder / TEMPLATE_FILE).write_text(str(template), encoding="utf-8", newline="")


def _read_pieces(found: Metadata) -> list[Piece]:
    tokens = found["tokens"]
    kinds = found.get("token_type", [TokenType.NORMAL] * len(tokens))
    scores = found.get("scores", [0.0] * len(tokens))
    if len(tokens) > LARGEST_VOCAB or len(set(tokens)) < len(tokens):
        raise UserError(f"{_PREFIX}tokens: must all be different")
    return [Piece(*each) for each in zip(tokens, scores, kinds, strict=True)]


def _read_spm(found: Metadata, pieces: list[Piece]) -> tokenizers.Tokenizer:
    if not any(piece.kind == TokenType.UNKNOWN for piece in pieces):
        unknown = found.get("unknown_token_id", 0)
        pieces[unknown] = pieces[unknown]._replace(kind=int(TokenType.UNKNOWN))
    pieces = [
        piece._replace(text=piece.text.replace(" ", "▁"))
        if piece.kind == TokenType.USER_DEFINED
        else piece
        for piece in pieces
    ]
    adds_space = found.get("add_space_prefix", True)
    model = SentencePieceModel(pieces, True, None, None, bool(adds_space), False)
    return model.to_tokenizer(prefix_after_special_tokens=True)


def _read_bpe(found: Metadata, pieces: list[Piece]) -> tokenizers.Tokenizer:
    split = found.get("pre")
    if split not in (_GPT2, *_PATTERNS):
        known = ", ".join((_GPT2, *_PATTERNS))
        raise UserError(f"{_PREFIX}pre: {split!r} is not supported; supported are {known}")
    vocabulary = {
        piece.text: number for number, piece in enumerate(pieces) if piece.kind != TokenType.UNUSED
    }
    merges = [tuple(merge.split(" ", 1)) for merge in found["merges"]]
    raw = _byte_level(models.BPE(vocabulary, merges, ignore_merges=split == _LLAMA3), split)
    if split == _QWEN2:
        raw.normalizer = normalizers.NFC()
    raw.add_special_tokens(
        [AddedToken(p.text, normalized=False) for p in pieces if p.kind == TokenType.CONTROL]
    )
    raw.add_tokens(
        [AddedToken(p.text, normalized=False) for p in pieces if p.kind == TokenType.USER_DEFINED]
    )
    return raw


def _byte_level(model: models.BPE, split: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes that splits texts in one of the known ways."""
    raw = tokenizers.Tokenizer(model)
    raw.decoder = decoders.ByteLevel()
    if split == _GPT2:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return raw
    pattern = tokenizers.Regex(_PATTERNS[split])
    words = pre_tokenizers.Split(pattern, "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_only])
    return raw
