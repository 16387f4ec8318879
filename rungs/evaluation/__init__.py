"""Scores on benchmarks, and completions of a run's `sample_prompts`.

    scoring            log-probabilities of continuations; accuracy on multiple-choice items
    harness            tasks of EleutherAI's lm-evaluation-harness, an optional extra
    harness_model      our models as the harness's `LM`
    checkpoint_scores  measure a checkpoint, and record its scores
    prompt_samples     the program that samples from each new checkpoint, on the CPU beside
                       training; `rungs/run/records.py` describes and reads `samples.jsonl`

To add a benchmark, add a method to `Measured` in `checkpoint_scores` and call it in
`rungs/cli/evaluate.py` and `rungs/training/background.py`. A task of the harness in YAML needs
no code (`--task-files`)."""
