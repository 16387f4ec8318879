"""What a run needs, before it starts: memory, FLOPs, communication, disk, time; and experiments of
several runs.

hardware       known devices: FLOP/s, memory, bandwidth; add a device to `devices.toml`
flops          parameters, by config, and FLOPs per token, counted in the traced step
memory         bytes per device, by component, and one rule for the peak
advice         which keys to change if memory does not suffice
communication  bytes sent per step, counted in the traced step
compiled_step  the step as traced, and as compiled for a device that may be absent: its memory, its
               kernels
program        what a compiled program's text says: collectives, kernels
profile        what JAX's profiler saw of a program, part by part; add a named scope here as well
forecast       all of these for one run, with time and the disk space of its checkpoints
report         a forecast as text and as JSON; `plan.py` prints it
policy_plan    forecast and report of a reinforcement learning run
model_summary  modules and arrays of a model; `model.py` prints it
ladder         model sizes for growing compute budgets; `plan.py --ladder`
power_law      loss against compute, fitted to recorded runs; `charts.py --power-law`
mup            muP's coordinate check, the same model at other widths"""
