"""A run's life: start or resume, train, watch the losses, save failed steps, redraw charts.

    start          launch(): every check and step of a start, in order
    resume         which checkpoint a start resumes from; what it refuses, what it moves aside
    trainer        the training loop
    run_report     what a start and an end log
    result_reader  read a step's results while the next step runs; warn about them
    loss_spikes    detect loss spikes
    failed_step    save what a failed step needs to be replayed
    replay         run a failed step again and name its first tensor that is not finite
    chart_process  redraw charts in another process

An experiment tracker (such as Weights & Biases) gets each step's metrics where they are written:
`Trainer._record` in `trainer` passes them to `MetricsLog` of `rungs/run/metrics.py`, and `start`
creates that log. Another training loop, such as reinforcement learning on its own batches, can
reuse the compiled step: `make_train_step` in `rungs/step/train_step.py`, as `trainer` does.

Imports every package above except `huggingface`, `scaling`, `diagnostics` and `charts`.
"""
