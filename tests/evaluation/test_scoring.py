"""Scores of continuations, loss on a text, and accuracy on multiple-choice items."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx

from rungs.checkpointing.load import load_model
from rungs.cli import evaluate
from rungs.common.errors import UserError
from rungs.config.sharding_config import Mode
from rungs.data.text.tokenizer import train_bpe
from rungs.evaluation import scoring
from rungs.evaluation.checkpoint_scores import Measured
from rungs.evaluation.scoring import Continuation, Scorer, read_items, split_tokens
from rungs.model.gpt import GPT
from rungs.parallel.sharding import Layout, create_mesh
from rungs.run.folder import RunFolder
from rungs.run.records import Evaluation
from rungs.step.state import named_arrays
from tests.cli.test_commands import BYTES, byte_model
from tests.support import reference_gpt
from tests.support.configs import model_config
from tests.support.tiny_reinforcement import write_start

CONTEXT = 8


def scorer_of(model: GPT, mode: Mode, batch_size: int) -> Scorer:
    """Return what scores with a model on eight devices."""
    layout = Layout(create_mesh((8, 1)), mode)
    graph, state = nnx.split(model)
    placed = nnx.merge(graph, jax.device_put(state, layout.shardings(state)))
    return Scorer(placed, layout, jnp.dtype("float32"), batch_size)


@pytest.mark.parametrize("mode", ["dp", "fsdp"])
def test_scores_are_sums_of_log_probabilities(mode: Mode) -> None:
    """In float64, by a model written separately; in batches of mixed and of too long texts."""
    config = model_config(context_length=CONTEXT)
    model, rng = GPT(config, jax.random.key(3)), np.random.default_rng(0)
    weights = {name: np.asarray(array, np.float64) for name, array in named_arrays(model).items()}
    texts = [rng.integers(0, config.vocab_size, n).tolist() for n in (2, 9, 5, 3, 14, 7, 4)]
    cuts = [1, 4, 1, 2, 11, 6, 2, 1]
    likely = [1]
    for _ in range(4):
        logits_SV = reference_gpt.forward(config, weights, np.array(likely, np.int32))[-1]
        likely.append(int(logits_SV[-1].argmax()))
    texts.append(likely)
    continuations = [Continuation(t[:cut], t[cut:]) for t, cut in zip(texts, cuts, strict=True)]
    found = dict(scorer_of(model, mode, 3).scores(continuations))
    assert sorted(found) == list(range(len(texts)))
    for index, (text, cut) in enumerate(zip(texts, cuts, strict=True)):
        window = text[-CONTEXT - 1 :]
        logits_SV = reference_gpt.forward(config, weights, np.array(window[:-1], np.int32))[-1]
        log_probs_SV = logits_SV - np.log(np.exp(logits_SV).sum(axis=-1, keepdims=True))
        places = range(len(window) - 1 - (len(text) - cut), len(window) - 1)
        own = [log_probs_SV[place, window[place + 1]] for place in places]
        assert found[index].log_prob == pytest.approx(sum(own), abs=1e-4)
        is_greedy = all(logits_SV[p].argmax() == window[p + 1] for p in places)
        assert found[index].is_greedy == is_greedy
    assert found[len(texts) - 1].is_greedy


def test_spaces_belong_to_the_continuation() -> None:
    tokenizer = train_bpe([], BYTES)
    found = split_tokens("ab  ", "c", tokenizer)
    assert (tokenizer.decode(found.context), tokenizer.decode(found.tokens)) == ("ab", "  c")
    empty = split_tokens("", "c", tokenizer)
    assert empty == Continuation([tokenizer.end_of_text], tokenizer.encode("c"))  # type: ignore[list-item]


@pytest.fixture
def copying_run(tmp_path: Path) -> Path:
    """A run with a model that repeats the last byte."""
    folder = tmp_path / "run" / "checkpoints" / "one"
    folder.mkdir(parents=True)
    return byte_model(folder, 50.0)


def test_a_model_is_loaded_in_parts(tmp_path: Path) -> None:
    weights = write_start(tmp_path / "weights")
    whole = named_arrays(load_model(weights))
    parts = named_arrays(
        load_model(weights, Layout(create_mesh((2, 1), devices=jax.devices()[:2]), "fsdp"))
    )
    assert any(array.addressable_shards[0].data.size < array.size for array in parts.values())
    for name, array in whole.items():
        np.testing.assert_array_equal(np.asarray(parts[name]), np.asarray(array))


def write(path: Path, *items: Any) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def item(prompt: str, *texts: str, answer: int) -> dict[str, Any]:
    return {"prompt": prompt, "choices": texts, "answer": answer}


def test_accuracy_is_printed_and_recorded(copying_run: Path, tmp_path: Path) -> None:
    """The third answer is right only per character: its choices differ in length, and the model
    likes both equally little."""
    path = write(
        tmp_path / "quiz.jsonl",
        item("a", "a", "b", answer=0),
        item("xb", "c", "b", "x", answer=0),
        item("c", "x", "ccccx", answer=1),
    )
    result = CliRunner().invoke(evaluate.main, [str(copying_run), "--choices", str(path)])
    assert result.exit_code == 0, result.output
    lines = RunFolder(copying_run.parents[2]).evaluations.read_text().splitlines()
    by_sum, by_character = map(Evaluation.model_validate_json, lines)
    assert (by_sum.task, by_sum.checkpoint, by_sum.items) == ("quiz", "one", 3)
    assert by_sum.metric == "accuracy"
    assert by_sum.value == pytest.approx(1 / 3)
    assert by_character.value == pytest.approx(2 / 3)
    assert by_sum.low is not None
    assert by_sum.high is not None
    assert by_sum.low < by_sum.value < by_sum.high
    assert "0.6667" in result.output


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    one = item("a\u2028", "b\u0085", "c", answer=0)
    path.write_bytes((json.dumps(one, ensure_ascii=False) + "\r\n").encode() * 2)
    assert [each.prompt for each in read_items(path)] == ["a\u2028"] * 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "jsonl:1: malformed JSON"),
        ("[]", "jsonl:1: must hold a JSON object"),
        (json.dumps({"prompt": "a", "choices": ["b", "c"]}), "jsonl:1: answer: missing"),
        (json.dumps({**item("a", "b", "c", answer=0), "hint": 1}), "hint: unknown key"),
        (json.dumps(item("a", "b", answer=0)), "choices: must be two or more"),
        (json.dumps(item("a", "b", "", answer=0)), "choices: must be two or more"),
        (json.dumps(item("a", "b", "c", "b", answer=0)), "choices: two are the same"),
        (json.dumps(item("a", "b", "c", answer=2)), "answer: 2 is not the index .* from 0 to 1"),
        (json.dumps(item("a", "b", "c", answer=-1)), "answer: -1 is not the index"),
        (json.dumps({**item("a", "b", "c", answer=0), "answer": "b"}), 'answer: "b" is not'),
        (json.dumps({**item("a", "b", "c", answer=0), "prompt": 3}), "prompt: 3 is not allowed"),
        ("", "has no items"),
    ],
)
def test_a_line_that_is_no_item_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=problem):
        read_items(path)


def test_a_choice_without_tokens_of_its_own_is_refused(
    copying_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "split_tokens", lambda *_: Continuation([1], []))
    path = write(tmp_path / "quiz.jsonl", item("a", "b", " ", answer=0))
    with pytest.raises(UserError, match=r'item 1: the choice "b" adds no token to its prompt'):
        Measured.find(str(copying_run), 2, tmp_path).on_choices(path, None)


def test_choices_with_the_same_tokens_are_refused(
    copying_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a tokenizer without upper case."""
    monkeypatch.setattr(scoring, "split_tokens", lambda *_: Continuation([1], [2]))
    path = write(tmp_path / "quiz.jsonl", item("a", "b", "B", answer=0))
    with pytest.raises(UserError, match=r'item 1: another choice has the tokens of "B"'):
        Measured.find(str(copying_run), 2, tmp_path).on_choices(path, None)


@pytest.mark.parametrize("length", [3, 8])
def test_a_text_is_scored_in_windows(length: int) -> None:
    """In float64: each token once, by those of its window before it."""
    tokenizer = train_bpe([], 257)
    config = model_config(context_length=CONTEXT, vocab_size=257)
    model = GPT(config, jax.random.key(3))
    weights = {name: np.asarray(array, np.float64) for name, array in named_arrays(model).items()}
    text = "é!" * 7
    ids = [tokenizer.end_of_text, *tokenizer.encode(text)]
    losses = []
    for first in range(0, len(ids) - 1, length):
        window = np.array(ids[first : first + length + 1], np.int32)
        logits_SV = reference_gpt.forward(config, weights, window[:-1])[-1]
        log_probs_SV = logits_SV - np.log(np.exp(logits_SV).sum(-1, keepdims=True))
        losses += [-log_probs_SV[place, token] for place, token in enumerate(window[1:])]
    found = scoring.score_text(text, scorer_of(model, "dp", 3), tokenizer, length)
    assert (found.tokens, found.bytes) == (21, 21)
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(np.mean(losses) / np.log(2), rel=1e-5)


def test_text_of_an_imported_model(tmp_path: Path) -> None:
    model, file = byte_model(tmp_path, 0.0), tmp_path / "text.txt"
    file.write_bytes(b"ab\r\n")
    arguments = [str(model), "--text", str(file)]
    result = CliRunner().invoke(evaluate.main, arguments)
    assert result.exit_code == 0, result.output
    assert f"{file}: 4 tokens, in windows of" in result.output
    assert f"bits per byte  {np.log2(BYTES):.4f}" in result.output
    result = CliRunner().invoke(evaluate.main, [*arguments, "--sequence-length", "100000"])
    assert "context_length is" in str(result.exception)
    file.write_bytes(b"")
    assert "has no text" in str(CliRunner().invoke(evaluate.main, arguments).exception)
