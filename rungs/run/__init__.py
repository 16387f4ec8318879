"""A run on disk: its folder, its metrics, and new runs made from it.

    folder        finds a run folder, its paths, the lock that the training process holds
    derive        makes a run folder from another with some keys changed
    metrics       metrics.jsonl: the fields of a step; reading, appending, repair after a crash
    recorded_run  configs and metrics of a run, as arrays and tables for charts and comparison

The trainer writes each step through `MetricsLog` in `metrics`. To send metrics to an experiment
tracker as well, start there; `rungs/training/start.py` creates the log.

Imports `common` and `config`.
"""
