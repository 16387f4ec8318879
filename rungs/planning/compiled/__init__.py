"""A run's step as compiled for a device, present or not.

targets      descriptions of absent devices for their compilers
step         compiles a run's real step for them: its memory, kernels and spills
collectives  bytes that devices send per step, and which of them overlap with computation
roofline     the least time of a step, part by part; add a named scope here as well
profile      what JAX's profiler saw of a program, part by part
work         FLOPs of an instruction, and bytes that it moves
report       a compiled step next to its estimate, and its roofline, as text and as JSON
hlo          parser of the text of a compiled program; trip counts of its loops"""
