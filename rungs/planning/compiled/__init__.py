"""What the compiler of a device says of a run's step, whether the device is here or not.

targets         devices that are not here, for their compilers; add a device here, too
step            a run's real step, compiled for them
collectives     bytes that devices send per step
overlap         which of them they send while they compute
kernels         which kernels a step runs, and its spills
report          a compiled step next to its estimate
roofline        the least time of a step, part by part, from these:
  step_parts      which part an instruction belongs to; add a named scope here, too
  step_flops      what the configs give
  matmuls         FLOPs of an instruction
  memory_traffic  bytes that it moves
roofline_report the same as a table and as JSON
hlo             parser of the text of a compiled program
hlo_groups      groups of devices in that text
hlo_trip_count  how often a loop of a compiled program runs
"""
