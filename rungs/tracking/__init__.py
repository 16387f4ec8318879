"""Experiment trackers: `"trackers": ["wandb", "tensorboard"]` in a run's config.

    tracker              the interface of trackers, and the list of them, including plugins
    feed                 a process per tracker that sends it the run, each step once
    mlflow_tracker       MLflow
    tensorboard_tracker  TensorBoard
    trackio_tracker      Trackio
    wandb_tracker        Weights & Biases

They read the run folder (`metrics.jsonl`, `samples.jsonl`, charts, evaluations), so training never
waits for a tracker, and one that was down catches up later.

To add a tracker, write a function that takes a `TrackedRun` and returns a `Tracker`. Add it to
`BUILT_IN` in `tracker`, or declare it in a package of your own as an entry point in the group
`rungs.trackers`."""
