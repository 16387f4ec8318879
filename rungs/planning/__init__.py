"""What a run will take, before it is paid for: memory, FLOPs, communication, disk, time.

    hardware                known devices: FLOP/s, memory, bandwidth; add a device here
    flops                   parameters and FLOPs per token
    memory                  bytes per device by component
    communication           bytes sent per step, computed from the config
    compiled_communication  bytes sent per step, read from a compiled program
    forecast                all of these for one run
    report                  a forecast as text
    oom_advice              what to change when memory does not suffice

Imports `common`, `config`, `data`, `run`, `parallel`, `model`, `optim`, `step` and `checkpointing`.
"""
