"""Scores on benchmarks.

    scoring            log-probabilities of continuations; accuracy on multiple-choice items
    harness            tasks of EleutherAI's lm-evaluation-harness, an optional extra
    harness_model      our models as the harness's `LM`
    checkpoint_scores  measure a checkpoint, and record its scores

To add a benchmark, add a method to `Measured` in `checkpoint_scores` and call it in
`rungs/commands/evaluate.py` and `rungs/training/benchmarks.py`. A task of the harness in YAML needs
no code (`--task-files`).

Imports `checkpointing` and the packages below it."""
