"""Device check: are this machine's results correct, and as fast as they should be? Measures the
devices that a run uses, and compares every kernel with its plain form. Works on any device; a CPU
has no published figures to compare with.

    check     all parts, in order; devices, driver, libraries, settings
    step      the run's own step: time, memory, determinism, checkpoint
    peaks     speed of matmuls, memory and links
    kernels   each kernel next to its plain form
    report    figures as a table and as JSON"""
