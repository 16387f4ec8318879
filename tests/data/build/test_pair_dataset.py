"""Datasets of pairs: each pair's tokens, errors with their line number, and no remains of a failed
build."""

import json
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from rungs.cli import download_dataset
from rungs.common.errors import UserError
from rungs.data.build import pair_dataset
from rungs.data.build.pair_dataset import read_pairs
from rungs.data.build.sections import LineSection, split_lines
from rungs.data.catalog import build_dataset
from rungs.data.text.tokenizer import Tokenizer, train_bpe
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.data.tokens.dataset import Dataset, Split

PAIRS = [(f"Question {i}: naïve 😀?\n", f"Answer\r\n{i}\u2028.") for i in range(100)]
TOKENIZER = train_bpe([prompt + answer for prompt, answer in PAIRS] * 3, 300)


def line(prompt: object, answer: object, *, ascii: bool = False) -> str:
    return json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=ascii)


def write(folder: Path, name: str, *lines: str | bytes, end: bytes = b"\n") -> Path:
    path = folder / f"{name}.jsonl"
    path.write_bytes(b"".join((x.encode() if isinstance(x, str) else x) + end for x in lines))
    return path


def build(
    tmp_path: Path, *files: Path, percent: float = 0, tokenizer: Tokenizer = TOKENIZER
) -> Dataset:
    build = partial(pair_dataset.build, tokenizer=tokenizer, validation_percent=percent)
    return build_dataset("chats", list(files), tmp_path / "datasets", build)


def read(dataset: Dataset, split: Split = "train") -> list[tuple[list[int], list[int]]]:
    """Tokens of each prompt, and of each answer with its end."""
    tokens, bounds = dataset.tokens(split), dataset.open(split).bounds
    assert bounds is not None
    starts = [0, *bounds[:][:-1, 1]]
    return [
        (tokens[start:answer].tolist(), tokens[answer:end].tolist())
        for start, (answer, end) in zip(starts, bounds[:], strict=True)
    ]


def tokenized(pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    end = TOKENIZER.end_of_text
    assert end is not None
    return [(TOKENIZER.encode(prompt), [*TOKENIZER.encode(x), end]) for prompt, x in pairs]


# Tokens


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n \t\n\n"])
def test_prompt_and_answer_are_tokenized_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    monkeypatch.setattr(pair_dataset, "_PAIRS_PER_BATCH", 7)
    lines = [line(*pair, ascii=i % 2 == 0) for i, pair in enumerate(PAIRS)]
    lines[0] = "\ufeff" + lines[0]
    dataset = build(tmp_path, write(tmp_path, "a", *lines, end=end))
    assert read(dataset) == tokenized(PAIRS)
    assert dataset.description.source.kind == "pairs"
    assert dataset.description.source.files == ["a.jsonl"]
    assert load_tokenizer(dataset.folder).encode("é x") == TOKENIZER.encode("é x")


def test_a_prompt_gets_a_begin_token_but_no_end_token(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(
        models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<s>", "</s>"])
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    lines = [line("a b", "b a"), line("", "a"), line("b</s>", "a")]
    dataset = build(tmp_path, write(tmp_path, "a", *lines), tokenizer=Tokenizer(words))
    assert read(dataset) == [([0, 2, 3], [3, 2, 1]), ([0], [2, 1]), ([0, 3, 1], [2, 1])]


def test_an_answer_gets_no_space_that_it_does_not_have(tmp_path: Path) -> None:
    """SentencePiece adds a space before every text: before the prompt, or the answer if there is no
    prompt."""
    llama = load_tokenizer(Path(__file__).parents[2] / "fixtures" / "tokenizers" / "mistral")
    pairs = [("Is it so?", "yes"), ("Is it so?", " yes"), ("", "yes")]
    lines = [line(*pair) for pair in pairs]
    (_, tight), (_, spaced), (_, alone) = read(
        build(tmp_path, write(tmp_path, "a", *lines), tokenizer=llama)
    )
    assert alone == spaced == [*llama.encode("yes"), llama.end_of_text]
    assert tight != spaced
    prompt = llama.encode("Is it so?")
    for answer, (_, text) in zip([tight, spaced], pairs[:2], strict=True):
        assert llama.decode([*prompt, *answer[:-1]]) == "Is it so?" + text


# Training and validation


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=2, max_size=12),
    blanks=st.integers(0, 3),
    percent=st.floats(0.1, 90),
)
def test_a_file_is_split_between_two_pairs(
    tmp_path: Path, sizes: list[int], blanks: int, percent: float
) -> None:
    lines = [line("x" * size, str(i)) for i, size in enumerate(sizes)]
    path = write(tmp_path, "a", *lines, end=b"\n" * (blanks + 1))
    parts = split_lines([LineSection.of_file(path)], percent)
    answers = {
        split: [int(pair.answer) for section in sections for pair in read_pairs(section, int)]
        for split, sections in parts.items()
    }
    assert answers["train"] + answers["validation"] == list(range(len(sizes)))
    assert answers["train"]
    assert answers["validation"]
    size = path.stat().st_size
    of_validation = sum(section.size for section in parts["validation"])
    longest = max(map(len, lines)) + blanks + 1
    assert abs(of_validation - size * percent / 100) <= longest + 1


def test_several_files_are_split_by_file(tmp_path: Path) -> None:
    files = [write(tmp_path, f"f{i}", *[line(str(i), str(k)) for k in range(9)]) for i in range(20)]
    dataset = build(tmp_path, *files, percent=10)
    found = {split: read(dataset, split) for split in dataset.splits}
    assert (len(found["train"]), len(found["validation"])) == (18 * 9, 2 * 9)
    prompts = {split: {tuple(prompt) for prompt, _ in pairs} for split, pairs in found.items()}
    assert len(prompts["train"]) == 18
    assert not prompts["train"] & prompts["validation"]


# Errors

GOOD = line("a", "b")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"prompt": "a", "answer": "b"', "malformed JSON at column 30: Expecting ',' delimiter"),
        ("[" * 100_000, "unreadable JSON|malformed JSON"),
        ('{"prompt": ' + "1" * 5000 + "}", "Exceeds the limit"),
        (b'{"prompt": "\xff", "answer": "b"}', "not UTF-8 text, near byte 13"),
        ('["a", "b"]', 'must hold a JSON object {…}, not ["a", "b"]'),
        ('{"prompt": "a"}', "answer: missing; this key is required"),
        (line("a", 3), "answer: 3 is not allowed; must be of type string"),
        (line(None, "b"), "prompt: null is not allowed"),
        (line("a", ""), 'answer: "" is not allowed; must not be empty'),
        ('{"prompt": "a", "anser": "b"}', 'anser: unknown key (value "b"); did you mean answer?'),
        ('{"prompt": "a", "prompt": "b", "answer": "c"}', "prompt: given more than once"),
        (line("a", "\ud800", ascii=True), "holds an invalid character"),
    ],
)
def test_a_bad_line_is_reported_and_nothing_is_built(
    tmp_path: Path, bad: str | bytes, message: str
) -> None:
    path = write(tmp_path, "a", *[GOOD] * 5, "", bad, GOOD)
    with pytest.raises(UserError) as caught:
        build(tmp_path, path, percent=50)
    found = str(caught.value)
    assert all(line.startswith(f"{path}: line 7: ") for line in found.split("\n"))
    assert any(option in found for option in message.split("|"))
    assert not [*(tmp_path / "datasets").iterdir()]


def test_an_answer_without_tokens_is_reported(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "a": 1}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = write(tmp_path, "a", line("a", "a"), line("a", "  "))
    with pytest.raises(UserError, match='line 2: answer: "  " has no tokens'):
        build(tmp_path, path, tokenizer=Tokenizer(words))


@pytest.mark.parametrize("lines", [[], ["", "  ", "\t"]])
def test_a_file_without_pairs_is_reported(tmp_path: Path, lines: list[str]) -> None:
    files = [write(tmp_path, "a", GOOD), write(tmp_path, "b", *lines)]
    for chosen in (files, files[1:]):
        with pytest.raises(UserError, match=r"b\.jsonl: has no lines"):
            build(tmp_path, *chosen)
    assert not [*(tmp_path / "datasets").iterdir()]


def test_a_single_pair_cannot_be_split(tmp_path: Path) -> None:
    path = write(tmp_path, "a", "", GOOD, "")
    with pytest.raises(
        UserError, match=r"line 2: this is the only line.* --validation-percent of 0"
    ):
        build(tmp_path, path, percent=5)
    assert build(tmp_path, path, percent=0).splits == ("train",)


def test_a_tokenizer_without_end_of_text_is_reported(tmp_path: Path) -> None:
    words = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0})))
    with pytest.raises(UserError, match="no end-of-text token"):
        build(tmp_path, write(tmp_path, "a", line("a", "a")), tokenizer=words)


# Memory


# The command


def options(tmp_path: Path, *arguments: object) -> list[str]:
    return [*map(str, arguments), "--datasets-dir", str(tmp_path / "datasets")]


def test_a_tokenizer_is_trained_on_prompts_and_answers_if_none_is_given(tmp_path: Path) -> None:
    """Not on the validation pairs, nor on keys and escapes."""
    lines = [line("tüdelü ", "hopsassa\n")] * 90 + [line("validate", "validate")] * 10
    path = write(tmp_path, "pairs.jsonl", *lines)
    arguments = ("--pairs", path, "--name", "own", "--vocab-size", 300, "--validation-percent", 10)
    result = CliRunner().invoke(download_dataset.main, options(tmp_path, *map(str, arguments)))
    assert result.exit_code == 0, result.output
    tokenizer = load_tokenizer(tmp_path / "datasets" / "own")
    assert f"tokenizer: vocab_size {tokenizer.vocab_size}" in result.stdout
    assert len(tokenizer.encode("tüdelü")) == len(tokenizer.encode("hopsassa")) == 1
    for rest in ("validate", "prompt", "answer", "\\n"):
        assert len(tokenizer.encode(rest)) > 1
