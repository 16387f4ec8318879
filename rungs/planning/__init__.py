"""What a run needs, before it starts: memory, FLOPs, communication, disk, time.

    hardware                known devices: FLOP/s, memory, bandwidth; add a device here
    flops                   parameters and FLOPs per token
    memory                  bytes per device, by component
    communication           bytes sent per step, computed from the config
    compiled_communication  bytes sent per step, read from a compiled program
    compile_targets         devices that are not here, for their compilers; add a device here, too
    compiled_step           a run's real step, compiled for such devices
    compiled_kernels        which kernels a compiled step runs, and its spills
    compiled_report         a compiled step next to its estimate
    compiled_overlap        which of these bytes are sent while the device computes
    hlo                     parser of the text of a compiled program
    hlo_groups              groups of devices in that text
    hlo_trip_count          how often a loop of a compiled program runs
    disk_space              what the checkpoints of a run need, with a warning at its start
    forecast                all of these for one run, with time
    report                  a forecast as a table and as JSON; `plan.py` prints it
    oom_advice              which keys to change when memory does not suffice
    model_summary           modules and arrays of a model; `model.py` prints it

Imports `common`, `config`, `data`, `run`, `parallel`, `model`, `optim`, `step` and `checkpointing`.
"""
