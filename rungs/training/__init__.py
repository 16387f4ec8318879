"""A run's life: start or resume, train, watch the losses, record failed steps, redraw charts.

    start          launch(): every check and step of a start, in order
    resume         which checkpoint a start resumes from; what it refuses, what it moves aside
    trainer        the training loop
    result_reader  read a step's results while the next runs; warn about them
    spikes         detect loss spikes
    failed_step    save what a failed step needs to be replayed
    replay         run a failed step again and name its first bad tensor
    chart_process  redraw charts in another process

Imports every package above except `huggingface`, `scaling`, `diagnostics` and `charts`.
"""
