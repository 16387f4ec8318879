"""A run on disk: its folder, its metrics, new runs made from it.

    folder        find a run folder, its paths, the lock that one trainer holds
    derive        make a run folder from another with keys changed
    metrics       metrics.jsonl: the fields of a step, append, repair after a crash, read
    recorded_run  a run's configs and metrics read back for charts and comparison

Imports `common` and `config`.
"""
