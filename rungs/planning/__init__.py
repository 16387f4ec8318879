"""What a run needs, before it starts: memory, FLOPs, communication, disk, time.

hardware       known devices: FLOP/s, memory, bandwidth; add a device to `devices.toml`
flops          parameters and FLOPs per token
memory         bytes per device, by component; which keys to change if they do not suffice
peaks          sizes of a step, its activations, and rules for peak memory under XLA's compilers
communication  bytes sent per step, computed from the config
compiled       the step as compiled for a device
forecast       all of these for one run, with time and the disk space of its checkpoints
rows           sections and tables of a report, from which text and JSON are made
report         a forecast as a table and as JSON; `plan.py` prints it
policy_plan    forecast and report of a reinforcement learning run
model_summary  modules and arrays of a model; `model.py` prints it"""
