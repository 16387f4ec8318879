"""What runs beside training. It reads the run folder, so training never waits for any of it.

    mirror_folder   files at a URL, through fsspec; mirror.json, which identifies the run
    mirroring       `--mirror`: uploads new and changed files; restores a run on another machine
    trackers        `"trackers": ["wandb"]`: wandb, tensorboard, trackio, mlflow
    tracking_feed   a process per tracker that sends it the run, each step once
    alerts          the events of a run, and its stalls
    hooks           `--on-event`: tells commands and webhooks
    supervisor      `--supervise`: restarts training after a crash

To add a tracker, write a function that takes a `TrackedRun` and returns a `Tracker`. Add it to
`BUILT_IN` in `trackers`, or declare it in a package of your own as an entry point in the group
`rungs.trackers`. A new event is a name of `EventKind` in `run/records.py` and a call of
`Alerts.note`; its sign on the page is in `report/assets/events.js`."""
