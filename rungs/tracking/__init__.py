"""Experiment trackers: `"trackers": ["wandb", "tensorboard"]` in a run's config.

    tracker              what a tracker does, and what it is told of a run
    registry             the trackers there are, also those of other packages
    feed                 the program that sends a run to one tracker, each step once
    tracking_process     that program beside training
    wandb_tracker, tensorboard_tracker, trackio_tracker, mlflow_tracker

The source is what the run folder has: `metrics.jsonl`, `samples.jsonl`, charts, evaluations. So a
tracker that was down gets what it lacks later, and training never waits for one.

To add a tracker: write a function that takes a `TrackedRun` and returns a `Tracker`, and either add
it to `BUILT_IN` in `registry` or, in a package of your own, declare it as an entry point in the
group `rungs.trackers`.

Imports `common`, `config` and `run`.
"""
