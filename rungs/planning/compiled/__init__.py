"""What the compiler of a device says of a run's step, whether the device is here or not.

targets      devices that are not here, for their compilers; add a device here as well
step         a run's real step, compiled for them
collectives  bytes that devices send per step
overlap      which of them they send while they compute
kernels      which kernels a step runs, and its spills
roofline     the least time of a step, part by part, from these:
step_parts   which part an instruction belongs to; add a named scope here as well
work         FLOPs of an instruction, and bytes that it moves
report       a compiled step next to its estimate, and its roofline, as text and as JSON
hlo          parser of the text of a compiled program; how often its loops run
"""
