"""Flags of XLA with which tests compile as quickly as it can."""

QUICK_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # emit LLVM's code without MLIR's passes in between, which take most of the time; jax 0.12 no
    # longer can, and ignores it
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters,xla_cpu_disable_tiled_emitter",
)
"""A third of the time, for programs that are slower."""
