"""Events and alerts of a run, and starting it again after a crash.

    alerts      the events of a run, stalls included: written to `events.jsonl`, told to the hooks
    hooks       commands and webhooks of `--on-event`
    webhook     the program that sends an event to a webhook
    supervisor  `--supervise`: training in a process of its own, started again after a crash

Imports `common` and `run`."""
