"""A run's life: start or resume, train, watch the losses, save failed steps, redraw charts.

    start          launch(): every check and step of a start, in order
    preparation    what every start needs, whatever it trains on
    resume         which checkpoint a start resumes from; what it refuses, what it moves aside
    trainer        the training loop
    run_report     what a start and an end log
    progress       a progress bar on a terminal, plain lines elsewhere and in `train.log`
    result_reader  read a step's results while the next step runs; warn about them
    loss_spikes    detect loss spikes
    failed_step    save what a failed step needs to be replayed
    replay         run a failed step again and name its first tensor that is not finite
    benchmarks     measure checkpoints on benchmarks while the run trains
    intervals      when checkpoints and validations are due
    dry_run        everything that a start does, and a few steps of which nothing is kept
    background     what runs beside the steps: charts, samples, trackers, alerts, the mirror
    chart_process  redraw charts in another process

What should follow each step or checkpoint without delaying it is called in `background`. Another
training loop is `rungs/reinforcement`, which uses `preparation`, `resume`, `progress` and
`background`.

Imports the packages listed before it in `rungs/__init__.py`, except `huggingface` and `scaling`.
"""
