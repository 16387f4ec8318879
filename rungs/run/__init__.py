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

To add a metric: compute it as a field of `StepResult` in `rungs/step/train_step.py`, add it to
`StepMetrics` in `metrics`, fill it in `DatasetLearner.read` in `rungs/training/dataset_learner.py`,
and draw it in `TRAINING_CHARTS` in `rungs/report/run_charts.py`. In reinforcement learning these
are `PolicyMetrics`, `policy_update.py` in `rungs/reinforcement`, and `POLICY_CHARTS`. A metric of
every kind of run is a field of `StepRecord`, which `record_fields` in `rungs/training/learner.py`
fills, and a chart in `STEP_CHARTS` in `rungs/report/run_charts.py`. Norms of gradients are
computed in `SkippingOptimizer.update` in `rungs/optim/skipping_optimizer.py`. A metric with parts,
such as a norm per layer, is an object, `{"0": 1.5}`: page and trackers show its numbers, but not
those of a list.

To add an experiment tracker, see `rungs/integrations/__init__.py`."""
