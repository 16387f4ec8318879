"""A run on disk: its folder, its metrics, and new runs made from it.

    folder        a run folder: finding it, its paths, the lock that one training process holds
    derive        makes a run folder from another with some keys changed
    metrics       metrics.jsonl: the fields of a step, in training and in reinforcement learning;
                  reading, appending, repair after a crash
    records       files with a record per line: evaluations.jsonl (benchmark scores), samples.jsonl
                  (completions of sample_prompts), events.jsonl (starts, stops)
    layer_record  layers.npy: what each layer did, with `watch_interval`
    step_table    metrics.jsonl as columns, re-read as it grows; the step of the best checkpoint
    recorded_run  configs and metrics of a run, smoothed for charts, and as tables

To add a metric, see docs/tasks/add-a-metric.md. A metric of every kind of run is a field of
`StepRecord`, which `record_fields` in `rungs/training/learner.py` fills from `StepResult` in
`rungs/step/train_step.py`; one of training on datasets alone is a field of `StepMetrics`, which
`DatasetLearner.read` fills. Its chart is in `STEP_CHARTS` in `rungs/report/run_charts.py`. Those of
reinforcement learning alone are in `PolicyMetrics`, `policy_update.py` in `rungs/reinforcement`,
and `POLICY_CHARTS`. To add an experiment tracker, see `rungs/integrations/__init__.py`."""
