"""Events and alerts of a run, and restarts after a crash.

alerts      the events of a run, stalls included: written to `events.jsonl`, sent to hooks
hooks       the commands and webhooks of `--on-event`
webhook     the program that sends an event to a webhook
supervisor  `--supervise`: training in a child process, restarted after a crash"""
