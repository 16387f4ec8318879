"""A run's life: start or resume, train, watch the losses, save failed steps, redraw charts.

    start          launch(): every check and step of a start, in order; `--dry-run`; devices, dtype,
                   a tidy run folder, model and optimizer
    run_length     how many steps a run takes, also with max_minutes
    resume         which checkpoint a start resumes from; what it refuses, what it moves aside
    trainer        the training loop of every kind of run; when checkpoints and validations are due
    learner        what differs between kinds of runs; the protocols that one implements
    next_token     next-token training: data, steps, validation
    run_report     what a start and an end log
    progress       a progress bar on a terminal, plain lines elsewhere and in `train.log`
    loss_spikes    detect loss spikes
    failed_step    what is not finite: save what replays it, end a run that cannot continue
    replay         run a failed step again and name its first tensor that is not finite
    benchmarks     measure checkpoints on benchmarks while the run trains
    background     what runs beside the steps: charts, samples, trackers, alerts, the mirror

What should follow each step or checkpoint without delaying it is called in `background`; what the
loop waits for is a hook, `Trainer.add_hook`. Another kind of run is `rungs/reinforcement`.

Imports the packages listed before it in `rungs/__init__.py`, except `huggingface` and `scaling`."""
