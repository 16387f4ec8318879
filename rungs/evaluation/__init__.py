"""Scores on benchmarks.

    scoring            log-probabilities of continuations; accuracy on multiple-choice items
    harness            tasks of EleutherAI's lm-evaluation-harness, an optional extra
    harness_model      our models as the harness's `LM`
    checkpoint_scores  measure a checkpoint, and record its scores

Imports `checkpointing` and the packages below it."""
