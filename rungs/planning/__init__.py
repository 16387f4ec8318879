"""What a run needs, before it starts: memory, FLOPs, communication, disk, time.

    hardware       known devices: FLOP/s, memory, bandwidth; add a device here
    flops          parameters and FLOPs per token
    memory         bytes per device, by component, from these:
    peaks          sizes of a step, activations that it keeps for the backward pass, and what it
                   needs by XLA's compilers for CPUs, GPUs and TPUs
    communication  bytes sent per step, computed from the config
    compiled       what a device's compiler says of the step
    forecast       all of these for one run, with time and the disk space of its checkpoints
    rows           sections and tables of a report, from which text and JSON are made
    report         a forecast as a table and as JSON; `plan.py` prints it
    policy_plan    what a run of reinforcement learning takes, and its report
    oom_advice     which keys to change when memory does not suffice
    model_summary  modules and arrays of a model; `model.py` prints it

Imports `common`, `config`, `data`, `run`, `parallel`, `model`, `optim`, `step` and `checkpointing`.
"""
