"""Experiment trackers: `"trackers": ["wandb", "tensorboard"]` in a run's config.

    tracker              what a tracker does, and the trackers there are, also in other packages
    feed                 a process for each tracker that sends it the run, each step once
    mlflow_tracker       MLflow
    tensorboard_tracker  TensorBoard
    trackio_tracker      Trackio
    wandb_tracker        Weights & Biases

They read the run folder: `metrics.jsonl`, `samples.jsonl`, charts, evaluations. So a tracker that
was down gets what it lacks later, and training never waits for one.

To add a tracker, write a function that takes a `TrackedRun` and returns a `Tracker`. Add it to
`BUILT_IN` in `tracker`, or declare it in a package of your own as an entry point in the group
`rungs.trackers`.

Imports `common`, `config` and `run`."""
