"""A tokenizer in the metadata of a GGUF file: of type `gpt2`, BPE over bytes with a named way to
split texts, or `llama`, SentencePiece's BPE, which merges the pair with the best score
(llama.cpp's `src/llama-vocab.cpp`). `gguf.SpecialVocab` isn't used: it guesses special tokens, and
has no names of ways to split."""

import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from gguf import Keys, TokenType
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from rungs.common.errors import UserError, errors_at
from rungs.data.text import tokenizer_files
from rungs.data.text.chat_template import TEMPLATE_FILE, ChatTemplate
from rungs.data.text.tokenizer import TOKENIZER_FILE, Tokenizer, library_errors
from rungs.huggingface.hf_tokenizer import write_json

Metadata = dict[str, Any]

_KEYS = Keys.Tokenizer
_STOPS = (_KEYS.EOS_ID, _KEYS.EOT_ID, _KEYS.EOM_ID)
_SPECIAL = {
    _KEYS.BOS_ID: "bos_token",
    _KEYS.EOS_ID: "eos_token",
    _KEYS.UNK_ID: "unk_token",
    _KEYS.PAD_ID: "pad_token",
}
"""Keys of special tokens, with their names in transformers."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = "llama-bpe", "qwen2"
_GROUPED_DIGITS = _WORDS + "{1,3}" + _REST
_PATTERNS = {
    "gpt-2": None,
    _LLAMA3: _GROUPED_DIGITS,
    _QWEN2: _WORDS + _REST,
    "dbrx": _GROUPED_DIGITS,
    "smaug-bpe": _GROUPED_DIGITS,
}
"""How texts are split into words before merges, by llama.cpp's names, of which the first that fits
is written; GPT-2's way is part of ByteLevel. Llama 3 keeps a word that is a token, as
`ignore_merges` says."""
_SPACE = "▁"  # U+2581 LOWER ONE EIGHTH BLOCK stands for a space inside pieces
_PROBE = "a  b ﬁ e\u0301 "
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_UNUSED, _UNKNOWN = "[PAD{}]", "<unk>"


class Piece(NamedTuple):
    """A token of the vocabulary; its id is its index."""

    text: str
    score: float
    kind: int


def spm_merges(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that merge into a third, those with the best score first. Scores
    stand for merges in SentencePiece's BPE (Kudo and Richardson 2018,
    https://aclanthology.org/D18-2012): of all neighbours, the pair with the best result merges."""
    scores = {piece.text: piece.score for piece in pieces if piece.kind == TokenType.NORMAL}
    cuts = ((text[:cut], text[cut:]) for text in scores for cut in range(1, len(text)))
    merges = [(first, rest) for first, rest in cuts if first in scores and rest in scores]
    return sorted(merges, key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0])))


def spm_tokenizer(pieces: list[Piece], adds_space: bool) -> tokenizers.Tokenizer:
    """Return a tokenizer that gives SentencePiece's ids. Characters without a piece become bytes;
    `adds_space` adds a space before a text, and after each special token in it."""

    def texts_of(kind: TokenType) -> list[str]:
        return [piece.text for piece in pieces if piece.kind == kind]

    model = models.BPE(
        {piece.text: number for number, piece in enumerate(pieces)},
        spm_merges(pieces),
        unk_token=texts_of(TokenType.UNKNOWN)[0],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        # Metaspace with ▁ alone would add none before a text that begins with ▁
        added = pre_tokenizers.Metaspace(" ", prepend_scheme="always", split=False)
        marked = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([added, marked])
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    for kind in (TokenType.CONTROL, TokenType.UNKNOWN):
        special = [AddedToken(text, normalized=False) for text in texts_of(kind)]
        tokenizer.add_special_tokens(special)
    # Matched after spaces became ▁, as some pieces, such as Gemma's, are several spaces.
    user_defined = texts_of(TokenType.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(text, normalized=True) for text in user_defined])
    return tokenizer


# Export


def to_metadata(
    folder: Path, stops: tuple[int, ...], vocab_size: int
) -> tuple[Metadata, list[str]]:
    """Return the metadata of an exported model's tokenizer and chat template, and notes on what
    llama.cpp does in another way. `stops` end a generated text. Raises UserError if llama.cpp has
    no such tokenizer."""
    if not (folder / TOKENIZER_FILE).is_file():
        return {_KEYS.MODEL: "none"}, []
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
    keys, notes = _spm_keys(content, pieces) if is_spm else _bpe_keys(content)
    keys |= {
        _KEYS.LIST: [piece.text for piece in pieces],
        _KEYS.TOKEN_TYPE: [piece.kind for piece in pieces],
        _KEYS.ADD_BOS: bool(tokenizer.begin),
        _KEYS.ADD_EOS: False,
    }
    names = tokenizer_files.special_tokens(tokenizer_files.finder(folder))
    ids = {piece.text: number for number, piece in enumerate(pieces)}
    keys |= {key: ids[names[name]] for key, name in _SPECIAL.items() if names.get(name) in ids}
    keys |= dict(zip(_STOPS, stops, strict=False))
    keys |= dict(zip((_KEYS.BOS_ID,), tokenizer.begin, strict=False))
    template = ChatTemplate.find(folder)
    return keys | ({_KEYS.CHAT_TEMPLATE: template.source} if template else {}), notes


def _pieces(content: Metadata, size: int) -> list[Piece]:
    """Return the tokens by id, those of SentencePiece with scores: the sooner merged, the
    higher."""
    model = content["model"]
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(model["merges"]):
        scores.setdefault(left + right, -float(rank))
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED}
    tokens = {number: (text, TokenType.NORMAL) for text, number in model["vocab"].items()}
    tokens |= {t["id"]: (t["content"], kinds[t["special"]]) for t in content["added_tokens"]}
    if model["byte_fallback"]:  # as llama.cpp's SentencePiece has them
        unknown = model["unk_token"] or _UNKNOWN
        for number, (text, kind) in tokens.items():
            if text == unknown:
                tokens[number] = text, TokenType.UNKNOWN
            elif kind == TokenType.NORMAL and _BYTE.fullmatch(text):
                tokens[number] = text, TokenType.BYTE
            elif kind == TokenType.USER_DEFINED:
                tokens[number] = text.replace(_SPACE, " "), kind
    every = (tokens.get(n, (_UNUSED.format(n), TokenType.UNUSED)) for n in range(size))
    return [Piece(text, scores.get(text, 0.0), int(kind)) for text, kind in every]


def _bpe_keys(content: Metadata) -> tuple[Metadata, list[str]]:
    model, normalizer = content["model"], content["normalizer"]
    wanted = _plain(content["pre_tokenizer"]), model["ignore_merges"]
    for split in _PATTERNS:
        known = json.loads(_byte_level({}, [], split).to_str())
        if (_plain(known["pre_tokenizer"]), known["model"]["ignore_merges"]) == wanted:
            break
    else:
        raise UserError("does not split texts as the tokenizer does")
    notes = []
    if normalizer == {"type": "NFC"}:
        notes = ["llama.cpp does not compose accents (NFC) before it splits a text into tokens"]
    elif normalizer is not None:
        raise UserError(f"lacks the tokenizer's normalizer, {normalizer['type']}")
    merges = [" ".join(pair) for pair in model["merges"]]
    return {_KEYS.MODEL: "gpt2", _KEYS.PRE: split, _KEYS.MERGES: merges}, notes


def _plain(part: Any) -> Any:
    """Return a pre-tokenizer without the key that only moves offsets. Removing all but the matches
    of a pattern that matches everything is splitting by it (OLMo 2)."""
    if isinstance(part, dict):
        removes_rest = part.get("behavior") == "Removed" and part.get("invert")
        part = part | ({"behavior": "Isolated", "invert": False} if removes_rest else {})
        return {k: _plain(v) for k, v in part.items() if k != "trim_offsets"}
    return [_plain(each) for each in part] if isinstance(part, list) else part


def _spm_keys(content: Metadata, pieces: list[Piece]) -> tuple[Metadata, list[str]]:
    raw = tokenizers.Tokenizer.from_str(json.dumps(content))
    text = raw.normalizer.normalize_str(_PROBE) if raw.normalizer else _PROBE
    parts = raw.pre_tokenizer.pre_tokenize_str(text) if raw.pre_tokenizer else [(text, ())]
    marked = _PROBE.replace(" ", _SPACE)
    prefixes = {marked: "", _SPACE + marked: _SPACE}
    prefix = prefixes.get(parts[0][0]) if len(parts) == 1 else None  # None: split before merges
    if prefix is None or not any(piece.kind == TokenType.UNKNOWN for piece in pieces):
        raise UserError("does not handle spaces as the tokenizer does")
    normal = {piece.text for piece in pieces if piece.kind == TokenType.NORMAL}
    merges = [(a, b) for a, b in content["model"]["merges"] if {a, b, a + b} <= normal]
    by_score = spm_merges(pieces)
    if set(merges) != set(by_score) or _results(merges) != _results(by_score):
        raise UserError("merges by score, and no scores give the tokenizer's merges")
    special = next((piece.text for piece in pieces if piece.kind == TokenType.CONTROL), "")
    theirs = spm_tokenizer(pieces, bool(prefix))
    notes = [
        f"llama.cpp adds a space also {where}"
        for where, probe in {
            "before a text that begins with one": " a",
            "after special tokens in a text": f"{special}a",
        }.items()
        if prefix and raw.encode(probe).tokens[-2:] != theirs.encode(probe).tokens[-2:]
    ]
    return {
        _KEYS.MODEL: "llama",
        _KEYS.PRE: "default",
        _KEYS.SCORES: [piece.score for piece in pieces],
        _KEYS.ADD_PREFIX: bool(prefix),
    }, notes


def _results(merges: list[tuple[str, str]]) -> list[str]:
    """Return what the merges make, in order; several in a row that make the same count once."""
    return [result for result, _ in itertools.groupby(a + b for a, b in merges)]


# Import


def write_files(metadata: Metadata, folder: Path) -> None:
    """Write a file's tokenizer, chat template and the tokens that end a text into a folder. Raises
    UserError if the tokenizer is damaged, or of a kind that is not supported."""
    kind = metadata.get(_KEYS.MODEL, "none")
    if kind in ("none", "no_vocab"):
        return
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{_KEYS.MODEL}: {kind!r} is not supported; supported are gpt2 and llama")
    with errors_at("", KeyError, TypeError, IndexError, AttributeError), library_errors("damaged"):
        tokens = metadata[_KEYS.LIST]
        kinds = metadata.get(_KEYS.TOKEN_TYPE, [TokenType.NORMAL] * len(tokens))
        scores = metadata.get(_KEYS.SCORES, [0.0] * len(tokens))
        if len(set(tokens)) < len(tokens):
            raise UserError(f"{_KEYS.LIST}: must all be different")
        pieces = [Piece(*each) for each in zip(tokens, scores, kinds, strict=True)]
        raw = (_read_spm if kind == "llama" else _read_bpe)(metadata, pieces)
        given = ((name, metadata.get(key)) for key, name in _SPECIAL.items())
        ids = {name: number for name, number in given if number is not None}
        names = {name: pieces[number].text for name, number in ids.items()}
        if metadata.get(_KEYS.ADD_BOS, kind == "llama" or metadata.get(_KEYS.PRE) == _LLAMA3):
            begin = names["bos_token"]
            raw.post_processor = processors.TemplateProcessing(
                [begin, "$A"], special_tokens=[(begin, ids["bos_token"])]
            )
    Tokenizer(raw).save(folder / TOKENIZER_FILE)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / tokenizer_files.CONFIG_FILE, names | config)
    stops = [metadata[key] for key in _STOPS if metadata.get(key) is not None]
    if stops:
        ends = stops if stops[1:] else stops[0]
        keys = {"eos_token_id": ends, "bos_token_id": ids.get("bos_token")}
        write_json(folder / tokenizer_files.GENERATION_FILE, keys)
    if template := metadata.get(_KEYS.CHAT_TEMPLATE):
        (folder / TEMPLATE_FILE).write_text(str(template), encoding="utf-8", newline="")


def _read_spm(metadata: Metadata, pieces: list[Piece]) -> tokenizers.Tokenizer:
    if not any(piece.kind == TokenType.UNKNOWN for piece in pieces):
        unknown = metadata.get(_KEYS.UNK_ID, 0)
        pieces[unknown] = pieces[unknown]._replace(kind=int(TokenType.UNKNOWN))
    pieces = [
        piece._replace(text=piece.text.replace(" ", _SPACE))
        if piece.kind == TokenType.USER_DEFINED
        else piece
        for piece in pieces
    ]
    return spm_tokenizer(pieces, bool(metadata.get(_KEYS.ADD_PREFIX, True)))


def _read_bpe(metadata: Metadata, pieces: list[Piece]) -> tokenizers.Tokenizer:
    split = metadata.get(_KEYS.PRE)
    if split not in _PATTERNS:
        known = ", ".join(_PATTERNS)
        raise UserError(f"{_KEYS.PRE}: {split!r} is not supported; supported are {known}")
    vocabulary = {
        piece.text: number for number, piece in enumerate(pieces) if piece.kind != TokenType.UNUSED
    }
    merges = [tuple(merge.split(" ", 1)) for merge in metadata[_KEYS.MERGES]]
    raw = _byte_level(vocabulary, merges, split)
    if split == _QWEN2:
        raw.normalizer = normalizers.NFC()
    for kind, add in {
        TokenType.CONTROL: raw.add_special_tokens,
        TokenType.USER_DEFINED: raw.add_tokens,
    }.items():
        add([AddedToken(piece.text, normalized=False) for piece in pieces if piece.kind == kind])
    return raw


def _byte_level(vocabulary: dict[str, int], merges: list[Any], name: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes that splits texts in one of the known ways."""
    model = models.BPE(vocabulary, merges, ignore_merges=name == _LLAMA3)
    raw, pattern = tokenizers.Tokenizer(model), _PATTERNS[name]
    raw.decoder = decoders.ByteLevel()
    if pattern is None:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return raw
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_only])
    return raw
