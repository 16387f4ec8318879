"""Wrong answers, and what the tests say about each. Not among the tests that run by themselves:

    uv run pytest assignment/tests/wrong_answers.py

A wrong answer is the solution with one piece of its text replaced, as a student might have it."""

import importlib
import inspect
from typing import Any

import pytest

from assignment.tests.blanks import ASSIGNMENT, Part
from assignment.tests.test_tokenizer import text_file  # noqa: F401 — a fixture

MATRIX, SPREAD = "linear_multiplies_by_its_weights", "linear_begins_with_a_truncated_normal"
TABLE = "embedding_begins_with_a_truncated_normal"
RMS, HALF = "rmsnorm_divides_by_the_root_of_the_mean_square", "rmsnorm_of_16_bits_does_not_overflow"
SILU, SWIGLU = "silu_multiplies_by_the_sigmoid", "swiglu_gates_with_w1_and_comes_back_with_w2"
ROPE, OWN = "rope_turns_neighbouring_channels", "rope_takes_positions_of_each_sequence"
SIGMA = "math.sqrt(2 / (in_features + out_features))"
MEAN_SQUARE = "jnp.mean(jnp.square(wide), axis=-1, keepdims=True)"
STACK = "jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)"

SOFTMAX, LARGE = "softmax_sums_to_1_over_an_axis", "softmax_of_large_numbers_does_not_overflow"
SCALED = "scaled_dot_product_attention_averages_values"
MASKED = "scaled_dot_product_attention_takes_a_mask"
HEADS, LATER = (
    "multihead_self_attention_is_that_of_each_head",
    "multihead_self_attention_sees_nothing",
)
PLAIN, TURNED = {"use_rope": False}, {"use_rope": True}
SEES = "positions[:, None] >= positions"

BLOCK, LM = "transformer_block_adds_to_its_input", "transformer_lm_computes_logits"
NAMES = "transformer_lm_has_the_parameters_of_the_task"
LOSS, GRADIENT = "cross_entropy_is_the_mean_over_targets", "cross_entropy_has_the_right_gradient"
ROWS = {"shape": (2, 3)}

CLIP, SHORT = "gradient_clipping_shortens_all_gradients_together", "gradient_clipping_leaves_short"
RATE, COMPILED = (
    "get_lr_cosine_schedule_rises_and_falls",
    "get_lr_cosine_schedule_works_in_a_compiled",
)
ADAMW = "adamw_follows_the_paper"

NEXT, ANYWHERE = "get_batch_has_the_next_token_as_target", "get_batch_starts_anywhere"
STEP, RESUMED = "train_step_returns_the_loss_before_its_update", "train_goes_on_as_if_nothing"
EVALUATE = "evaluate_is_the_mean_over_batches"
VALUE = "value, gradients = nnx.value_and_grad(loss)(model)\n    optimizer.update(model, gradients)"

RESTORED = "checkpoint_restores_model_and_optimizer"
MERGE, TRAIN = "merge_pair_goes_from_left_to_right", "train_bpe_joins_the_most_frequent_pair"
EQUALS, ENCODE = "train_bpe_takes_the_greatest_of_equals", "encode_matches_tiktoken"
SPECIALS, PARTS = "train_bpe_learns_nothing_from_special", "encode_iterable_is_encode_however"
SPLIT = "create_model_and_optimizer_splits_weights_and_moments"

WRONG: dict[str, list[tuple[Any, ...]]] = {
    "layers": [
        (
            "shape = (in_features, out_features)",
            "shape = (out_features, in_features)",
            MATRIX,
            "in_features, out_features",
        ),
        (SIGMA, "2 / (in_features + out_features)", SPREAD, "this is the variance"),
        (SIGMA, "math.sqrt(2 / in_features)", SPREAD, "counts inputs alone"),
        (
            "jax.random.truncated_normal(key, -3, 3, shape)",
            "jax.random.normal(key, shape)",
            SPREAD,
            "truncated at 3 σ",
        ),
        (
            "rngs.params(), shape, sigma",
            "jax.random.key(0), shape, sigma",
            SPREAD,
            "a new key for each",
        ),
        (
            "shape, sigma, dtype",
            "shape, sigma, jnp.float32",
            "linear_has_the_dtype",
            "that of the weights",
        ),
        (
            "self.weights[...][token_ids]",
            "jnp.take(self.weights[...], token_ids.ravel(), axis=0)",
            "embedding_returns_the_rows",
            "a row for each",
        ),
        (
            "shape, 1.0, dtype",
            "shape, math.sqrt(2 / sum(shape)), dtype",
            TABLE,
            "the formula of Linear",
        ),
        (
            MEAN_SQUARE,
            "jnp.sum(jnp.square(wide), axis=-1, keepdims=True)",
            RMS,
            "the sum of squares",
        ),
        (MEAN_SQUARE, "jnp.mean(jnp.square(wide), axis=-2, keepdims=True)", RMS, "axis=-2"),
        (MEAN_SQUARE, "jnp.mean(jnp.square(wide))", RMS, "each has its own"),
        (
            "jax.lax.rsqrt(mean_square + self.eps)",
            "1 / (jnp.sqrt(mean_square) + self.eps)",
            RMS,
            "added to the root",
        ),
        (
            "wide = x.astype(jnp.float32)",
            "wide = (x := x.astype(jnp.float32)) - x.mean(-1, keepdims=True)",
            RMS,
            "as in LayerNorm",
        ),
        ("normalized * self.weights[...]", "normalized", RMS, "scale of the channels"),
        ("wide = x.astype(jnp.float32)", "wide = x", HALF, "too large for float16"),
        (
            "self.weights[...]).astype(x.dtype)",
            "self.weights[...])",
            HALF,
            "back to the dtype of x",
        ),
        ("x * jax.nn.sigmoid(x)", "jax.nn.sigmoid(x)", SILU, "this is sigmoid"),
        ("x * jax.nn.sigmoid(x)", "jax.nn.gelu(x)", SILU, "this is gelu"),
        (
            "x * jax.nn.sigmoid(x)",
            "x / (1 + jnp.exp(-x))",
            "silu_has_a_gradient_everywhere",
            "overflows",
        ),
        ("silu(self.w1(x)) * self.w3(x)", "silu(self.w3(x)) * self.w1(x)", SWIGLU, "swapped"),
        (
            "silu(self.w1(x)) * self.w3(x)",
            "silu(self.w1(x) * self.w3(x))",
            SWIGLU,
            "of the product",
        ),
        ("silu(self.w1(x)) * self.w3(x)", "silu(self.w1(x))", SWIGLU, "w3 is missing"),
        (
            "x[..., 0::2], x[..., 1::2]",
            "jnp.split(x, 2, axis=-1)",
            ROPE,
            "come out as neighbours",
        ),
        (
            STACK,
            STACK.replace("cos - odd", "cos + odd").replace("sin + odd", "-sin + odd"),
            ROPE,
            "the other way",
        ),
        (
            f"x[..., 0::2], x[..., 1::2]\n        rotated = {STACK}",
            f"jnp.split(x, 2, axis=-1)\n        rotated = {STACK.replace('stack', 'concatenate')}",
            ROPE,
            "as in Llama",
        ),
        (
            "self.cos[...][token_positions], self.sin[...][token_positions]",
            "self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]",
            ROPE,
            "token_positions is not used",
        ),
        ("2, dtype=jnp.float32) / d_k", "2, dtype=jnp.float32) / d_k / 2", ROPE, "exponent is 2i"),
        (
            "self.cos[...][token_positions], self.sin[...][token_positions]",
            "(a[...][token_positions.reshape(-1, x.shape[-2])[0]] for a in (self.cos, self.sin))",
            OWN,
            "those of the first",
        ),
        (
            "self.cos = nnx.Cache",
            "self.cos = nnx.Param",
            "rope_has_caches_and_no_parameters",
            "an optimizer would train",
        ),
    ],
    "attention": [
        (
            "    exponentials = jnp.exp(x",
            "    axis = -1\n    exponentials = jnp.exp(x",
            SOFTMAX,
            "over axis -1",
            {"axis": 0},
        ),
        (
            " / jnp.sum(exponentials, axis=axis, keepdims=True)",
            "",
            SOFTMAX,
            "not divided by the sum",
            {"axis": 0},
        ),
        (
            "jnp.exp(x - jnp.max(x, axis=axis, keepdims=True))",
            "jnp.exp(x)",
            LARGE,
            "Subtract the largest",
        ),
        (" / math.sqrt(query.shape[-1])", "", SCALED, "are not divided by the root"),
        ("/ math.sqrt(query.shape[-1])", "/ query.shape[-1]", SCALED, "divided by H"),
        ("softmax(scores, axis=-1)", "softmax(scores, axis=-2)", SCALED, "over queries"),
        (
            "jnp.where(mask, scores, -jnp.inf)",
            "jnp.where(mask, -jnp.inf, scores)",
            MASKED,
            "the other way round",
        ),
        ("jnp.where(mask, scores, -jnp.inf)", "scores * mask", MASKED, "a score like others"),
        ("scores = jnp.where(mask, scores, -jnp.inf)", "pass", MASKED, "not used"),
        (SEES, "positions[:, None] >= positions - 1", HEADS, "off by one", PLAIN),
        (SEES, "positions[:, None] > positions", HEADS, "sees no key at all", PLAIN),
        (SEES, "positions[:, None] >= 0 * positions", HEADS, "mask is missing", TURNED),
        (SEES, "positions[:, None] >= positions - 1", LATER, "depends on later ones"),
        (
            "jnp.swapaxes(heads, -2, -3).reshape(x.shape)",
            "heads.reshape(x.shape)",
            HEADS,
            "side by side",
            PLAIN,
        ),
        (
            "self.num_heads, -1), -2, -3)",
            "-1, self.num_heads), -1, -3).swapaxes(-1, -2)",
            HEADS,
            "head n has",
            PLAIN,
        ),
        (
            "self.O_proj(jnp.swapaxes(heads, -2, -3).reshape(x.shape))",
            "jnp.swapaxes(heads, -2, -3).reshape(x.shape)",
            HEADS,
            "O_proj is missing",
            PLAIN,
        ),
        (
            "query, key = self.rope(query, positions), self.rope(key, positions)",
            "query, key, value = (self.rope(a, positions) for a in (query, key, value))",
            HEADS,
            "values are rotated",
            TURNED,
        ),
        ("if use_rope:", "if True:", HEADS, "though use_rope is False", PLAIN),
    ],
    "model": [
        (
            "x = x + self.MHA(self.RMSNorm1(x), use_rope=True)\n"
            "        return x + self.SwiGLU(self.RMSNorm2(x))",
            "x = x + self.RMSNorm1(self.MHA(x, use_rope=True))\n"
            "        return x + self.RMSNorm2(self.SwiGLU(x))",
            BLOCK,
            "norms are of the outputs",
        ),
        (
            "x = x + self.MHA(self.RMSNorm1(x), use_rope=True)\n        return x +"
            " self.SwiGLU(self.RMSNorm2(x))",
            "x = self.RMSNorm1(x + self.MHA(x, use_rope=True))\n        return self.RMSNorm2(x +"
            " self.SwiGLU(x))",
            BLOCK,
            "come after the sums",
        ),
        (", use_rope=True", "", BLOCK, "without RoPE"),
        ("x = x + self.MHA", "x = self.MHA", BLOCK, "isn't added to its input x"),
        ("return x + self.SwiGLU", "return self.SwiGLU", BLOCK, "isn't added to its input y"),
        ("self.RMSNorm2(x)", "self.RMSNorm1(x)", BLOCK, "RMSNorm2 is before"),
        ("self.linear(self.ln1(x))", "self.linear(x)", LM, "ln1"),
        (
            "self.linear(self.ln1(x))",
            "jax.nn.softmax(self.linear(self.ln1(x)))",
            LM,
            "return the logits themselves",
        ),
        (
            "self.linear(self.ln1(x))",
            "self.ln1(x) @ self.token_embeddings.weights[...].T",
            LM,
            "a matrix of their own",
        ),
        (
            "self.ln1 = RMSNorm(rngs, d_model)",
            "self.norm = RMSNorm(rngs, d_model)",
            NAMES,
            "missing: ln1",
        ),
        (
            "self.d_ff, self.theta = d_ff, theta",
            "pass",
            "transformer_lm_remembers_its_arguments",
            "a checkpoint needs it",
        ),
    ],
    "loss": [
        (
            "jnp.mean(log_sums - of_targets)",
            "jnp.sum(log_sums - of_targets)",
            LOSS,
            "sum over targets",
            ROWS,
        ),
        ("jnp.mean(log_sums - of_targets)", "log_sums - of_targets", LOSS, "one number", ROWS),
        (
            "jnp.mean(log_sums - of_targets)",
            "jnp.mean(jnp.sum(log_sums - of_targets, axis=-1))",
            LOSS,
            "number of all",
            ROWS,
        ),
        ("log_sums - of_targets)", "of_targets - log_sums)", LOSS, "the sign", ROWS),
        ("log_sums - of_targets)", "log_sums - of_targets) / jnp.log(2)", LOSS, "in bits", ROWS),
        (
            "logits - jnp.max(logits, axis=-1, keepdims=True)",
            "jax.nn.softmax(logits)",
            LOSS,
            "softmax is taken twice",
            ROWS,
        ),
        (
            "logits - jnp.max(logits, axis=-1, keepdims=True)",
            "logits",
            "cross_entropy_of_large_logits",
            "Subtract the largest",
        ),
        (
            "jnp.mean(log_sums - of_targets)",
            "jnp.mean(jax.lax.stop_gradient(log_sums) - jnp.take_along_axis(logits, targets[...,"
            " None], axis=-1)[..., 0])",
            GRADIENT,
            "has one, too",
        ),
    ],
    "optimizer": [
        (
            "jax.tree.map(lambda leaf: leaf * scale, gradients)",
            "jax.tree.map(lambda g: g * jnp.minimum(1, max_l2_norm / jnp.linalg.norm(g)),"
            " gradients)",
            CLIP,
            "by its own norm",
        ),
        ("jnp.sqrt(sum(squares))", "sum(squares)", CLIP, "its root is missing"),
        ("max_l2_norm / norm, 1.0)", "1 / norm, 1.0)", CLIP, "have the norm 1"),
        (
            "jnp.where(norm > max_l2_norm, max_l2_norm / norm, 1.0)",
            "max_l2_norm / norm",
            SHORT,
            "it stays as it is",
            {"scale": 1.0},
        ),
        (
            "jnp.where(norm > max_l2_norm, max_l2_norm / norm, 1.0)",
            "max_l2_norm / norm",
            SHORT,
            "become NaN",
            {"scale": 0.0},
        ),
        (
            "max_learning_rate * it /",
            "max_learning_rate * (it + 1) /",
            RATE,
            "one step ahead",
            {"step": 5, "expected": 0.5},
        ),
        (
            "numpy.minimum((it - warmup_iters) / (cosine_cycle_iters - warmup_iters), 1)",
            "(it - warmup_iters) / (cosine_cycle_iters - warmup_iters)",
            RATE,
            "stays at the minimum",
            {"step": 50, "expected": 0.1},
        ),
        (
            "(it - warmup_iters) / (cosine_cycle_iters - warmup_iters)",
            "it / cosine_cycle_iters",
            RATE,
            "counts from step 0",
            {"step": 25, "expected": 0.55},
        ),
        (
            "min_learning_rate + height * (max_learning_rate - min_learning_rate)",
            "height * max_learning_rate",
            RATE,
            "goes down to 0",
            {"step": 25, "expected": 0.55},
        ),
        (
            "return numpy.where(it < warmup_iters, warmup, cosine)",
            "return warmup if it < warmup_iters else cosine",
            COMPILED,
            "has no value yet",
        ),
        (
            "max(warmup_iters, 1)",
            "warmup_iters",
            "get_lr_cosine_schedule_can_do_without_warmup",
            "don't divide by it",
        ),
        ('weight_decay=optimizer_config["weight_decay"],', "", ADAMW, "that of optax"),
        ("b1=beta1,\n        b2=beta2,", "", ADAMW, "0.9 and 0.999"),
        ("b1=beta1,\n        b2=beta2", "b1=beta2,\n        b2=beta1", ADAMW, "swapped"),
        (
            "lr_schedule or optimizer",
            "optimizer",
            "adamw_takes_the_learning_rate",
            "schedule is not used",
        ),
        (
            "optax.chain(clip, adamw)",
            "optax.chain(adamw, clip)",
            "adamw_gets_clipped_gradients",
            "clipping comes before",
        ),
    ],
    "data": [
        (
            'np.memmap(path, dtype=dtype, mode="r")',
            "np.fromfile(path, dtype)",
            "open_tokens_maps_a_file",
            "reads the whole file",
        ),
        (
            "tokens[:, :-1], tokens[:, 1:]",
            "tokens[:, :-1], tokens[:, :-1]",
            NEXT,
            "the targets are the inputs",
        ),
        (
            "tokens[:, :-1], tokens[:, 1:]",
            "tokens[:, 1:], tokens[:, :-1]",
            NEXT,
            "swapped|tokens before",
        ),
        (
            "tokens[:, :-1], tokens[:, 1:]",
            "tokens[:, :-1], np.roll(tokens[:, :-1], -1, axis=1)",
            NEXT,
            "np.roll",
        ),
        (".astype(np.int32)", "", NEXT, "int32, not uint16"),
        (
            "(batch_size,), 0, n_starts)",
            "(batch_size,), 0, max(n_starts - 1, 1))",
            ANYWHERE,
            "never drawn",
        ),
        (
            "(rngs(), (batch_size,)",
            "(jax.random.key(0), (batch_size,)",
            ANYWHERE,
            "some starts|more likely",
        ),
        (
            "if n_starts < 1:",
            "if n_starts < 2:",
            "get_batch_takes_the_only_start",
            "5 tokens are enough",
        ),
        ("if mesh is None:", "if True:", "get_batch_is_split_over_devices", "NamedSharding"),
    ],
    "checkpoint": [
        (
            "nnx.update(optimizer, _filled",
            "(lambda *_: None)(optimizer, _filled",
            RESTORED,
            "the optimizer's",
        ),
        (
            "partial.write_bytes(content)\n",
            "Path(out).write_bytes(content)\n        partial.write_bytes(content)\n",
            "checkpoint_is_replaced_only",
            "is gone before",
        ),
        (
            "SAVED = nnx.Not(nnx.Cache)",
            "SAVED = ...",
            "checkpoint_is_a_file_that_others_read",
            "caches",
        ),
        (
            "jax.device_put(tensors[_name(part, path)], device)",
            "jax.numpy.asarray(tensors[_name(part, path)])",
            "checkpoint_comes_back_to_the_same",
            "with the sharding",
        ),
        (
            "isinstance(value, int | float | str) and name[0].isalpha()",
            "isinstance(value, int)",
            "checkpoint_is_a_file_that_others_read",
            "numbers or text",
        ),
    ],
    "training": [
        (
            f"    {VALUE}\n    return value",
            f"    {VALUE}\n    return loss(model)",
            STEP,
            "after the update",
        ),
        (
            "    optimizer.update(model, gradients)\n    return",
            "    return",
            STEP,
            "the same as before",
        ),
        (
            "cross_entropy(model(inputs_BS), targets_BS)",
            "cross_entropy(model(inputs_BS), targets_BS) * targets_BS.size",
            STEP,
            "sum over tokens",
        ),
        (
            "@nnx.jit\ndef train_step",
            "def train_step",
            "train_step_is_compiled_once",
            "in every step",
        ),
        ("np.mean(losses)", "np.sum(losses)", EVALUATE, "the sum over batches"),
        (
            "step + 1, checkpoint)",
            "step, checkpoint)",
            RESUMED,
            "number of steps that are done",
            {"interrupted_at": 4},
        ),
        ("range(done, steps)", "range(steps)", RESUMED, "steps are left", {"interrupted_at": 4}),
        (
            "batch_of(step)))\n",
            "batch_of(step - done)))\n",
            RESUMED,
            "the batch of step 4",
            {"interrupted_at": 4},
        ),
        (" or step + 1 == steps:", ":", "train_does_nothing_once_all", "after the last step"),
    ],
    "tokenizer": [
        (
            "at += 2 if is_pair else 1",
            "at += 1",
            MERGE,
            "other bytes than the word",
        ),
        ("at < last and", "at + 1 < last and", MERGE, "the last two tokens"),
        ("while len(vocab) < vocab_size", "while len(merges) < vocab_size", TRAIN, "3 merges"),
        (
            "[token.encode() for token in special_tokens] + [bytes([byte]) for byte in range(256)]",
            "[bytes([byte]) for byte in range(256)] + [token.encode() for token in special_tokens]",
            TRAIN,
            "the first ids",
        ),
        (
            "self.pair > other.pair",
            "self.pair < other.pair",
            EQUALS,
            "of equals it is the greatest",
        ),
        (
            "for w, n in counts.items() if w not in special_tokens",
            "for w, n in counts.items()",
            SPECIALS,
            "are taken out",
        ),
        ("min(pairs, key=self._ranks.__getitem__)", "pairs[0]", ENCODE, "learned first"),
        ("key=len, reverse=True)", "key=len)", "encode_prefers_the_longest", "the longest one"),
        (
            "self.vocab, self.merges = dict(vocab)",
            "self.vocab, self.merges = vocab",
            "encode_gives_new_special",
            "copy it",
        ),
        ('.decode(errors="replace")', ".decode()", "decode_replaces_half", "half a character"),
        (
            "<= len(rest) - longest][:-2]",
            "<= len(rest)]",
            PARTS,
            "may go on in",
            {"size": 3, "special": []},
        ),
        (
            "yield from (piece for piece, _ in _pieces(rest, special_tokens))",
            "",
            PARTS,
            "is lost",
            {"size": 3, "special": []},
        ),
    ],
    "sharding": [
        (
            "auto = (AxisType.Auto,)",
            "auto = (AxisType.Explicit,)",
            "create_mesh_names_the_axes",
            "AxisType.Auto",
        ),
        (
            'dense_out=("tensor", None)',
            'dense_out=(None, "tensor")',
            "get_sharding_config_for_mode_splits",
            "nothing of the others",
            {"mode": "tp", "axes": {"tensor"}},
        ),
        (
            '("data" if "data" in SPLIT_AXES[mode] else None, None)',
            '("data", None)',
            "batch_sharding_splits_rows",
            "the whole batch",
        ),
        (
            "            _constrain(optimizer, mesh, sharding_config)\n",
            "",
            SPLIT,
            "a moment is split",
            {"mode": "tp"},
        ),
        (
            "(optimizer_config, gradient_clip, lr_schedule)",
            "(optimizer_config)",
            "create_model_and_optimizer_passes",
            "lr_schedule",
        ),
    ],
}
"""By part: what is replaced, by what, the test, a part of what it says, and its other arguments."""


@pytest.mark.parametrize(
    ("part", "right", "wrong", "test", "says", "arguments"),
    [
        pytest.param(part, *wrong[:4], *(wrong[4:] or ({},)), id=wrong[2])
        for part, answers in WRONG.items()
        for wrong in answers
    ],
)
def test_a_wrong_answer_is_told_why(
    part: str,
    right: str,
    wrong: str,
    test: str,
    says: str,
    arguments: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    tests = importlib.import_module(f"assignment.tests.test_{part}")
    [name] = (name for name in vars(tests) if name.startswith(f"test_{test}"))
    call = getattr(tests, name)
    others = inspect.signature(call).parameters.keys() - arguments.keys() - {"code"}
    given = {name: request.getfixturevalue(name) for name in others}
    code = Part(ASSIGNMENT, part).wrong_answer(right, wrong)
    with pytest.raises(AssertionError, match=says):
        call(code, **arguments, **given)
