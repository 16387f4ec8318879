"""What the compiler of a device says of a run's step, whether the device is here or not.

targets      devices that are not here, for their compilers; add a device here as well
step         a run's real step, compiled for them: its memory, kernels and spills
collectives  bytes that devices send per step, and which of them while they compute
roofline     the least time of a step, part by part; add a named scope here as well
work         FLOPs of an instruction, and bytes that it moves
report       a compiled step next to its estimate, and its roofline, as text and as JSON
hlo          parser of the text of a compiled program; how often its loops run"""
