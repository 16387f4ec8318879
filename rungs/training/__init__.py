"""A run's life: start or resume, train, watch the losses, save failed steps, redraw charts.

    start          launch(): all checks and steps of a start, in order; `--dry-run`; devices, dtype,
                   cleanup of the run folder, model and optimizer
    run_length     the number of steps of a run, also with max_minutes
    resume         which checkpoint a start resumes from; what it refuses, what it moves aside
    trainer        the training loop of every kind of run; when checkpoints and validations are due,
                   when stop_after ends a run
    learner        protocols for what differs between kinds of runs
    next_token     next-token training: data, steps, validation
    preferences    learning from preferences: the same steps on pairs of answers; their reference
    distillation   learning from a teacher: the same steps with what it predicts
    objectives     which class takes the steps of which `objective`
    run_report     log messages at a start and an end
    progress       a progress bar on a terminal, plain lines elsewhere and in `train.log`
    failed_steps   loss spikes and non-finite steps: find, report and save them for replay; end a
                   run that cannot continue
    profiling      `--profile`: where the time of a step goes
    replay         repeats a failed step and names its first non-finite tensor
    benchmarks     measures checkpoints on benchmarks during training
    background     work beside the steps: charts, samples, trackers, alerts, the mirror

Work after each step or checkpoint that should not delay it is called in `background`; work that the
loop waits for is a hook, `Trainer.add_hook`. Another kind of run is `rungs/reinforcement`."""
