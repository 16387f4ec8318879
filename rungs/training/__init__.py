"""A run's life: start or resume, train, watch the losses, save failed steps, redraw charts.

    start          launch(): all checks and steps of a start, in order; `--dry-run`; devices, dtype,
                   cleanup of the run folder, model and optimizer
    run_length     the number of steps of a run, also with max_minutes
    resume         which checkpoint a start resumes from; what it refuses, what it moves aside
    trainer        the training loop of every kind of run; when checkpoints and validations are due,
                   when stop_after ends a run
    learner        protocols for what differs between kinds of runs
    dataset_learner  takes the steps of every objective on a dataset
    run_report     what a run tells: log messages at a start and an end, and its progress
    failed_steps   loss spikes and non-finite steps: find, report and save them for replay; end a
                   run that cannot continue
    replay         repeats a failed step and names its first non-finite tensor
    profiling      `--profile`: where the time of a step goes
    background     work beside the steps: charts, samples, trackers, alerts, the mirror; benchmarks

Work after each step or checkpoint that should not delay it is called in `background`. Another kind
of run is `rungs/reinforcement`."""
