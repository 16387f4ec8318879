"""Sharing work between devices and processes: sharding modes, mesh, collectives, process setup.

    sharding       the mesh of devices; names of its axes, of array axes, of parts of the model; the
                   sharding modes (`MESH_AXES`); where arrays and batches live on the mesh
    devices        choose the devices of a run
    fsdp           all-gather sharded weights, look up rows of sharded tables; sum gradients over
                   devices, in every mode
    collectives    psum and others inside shard_map
    processes      connect the processes, detect lost ones; broadcast and agree between them
    jax_setup      settings before JAX starts: compilation cache, CPU devices, determinism;
                   settings outside a run's files that affect its results
    gpu_settings   JAX's share of GPU memory; flags of XLA's GPU compiler
    target_device  the kind of device a program is traced for: the local one or a planned one;
                   barriers that keep XLA from fusing, by platform

To add a sharding mode, add its name to `Mode` and its mesh to `mesh_axes`, `ShardingConfig.sizes`
and `mode_problem`, all in `config/sharding_config.py`, and its row to `MESH_AXES` in `sharding.py`;
`planning/memory.py` and `planning/communication.py` use these. Whether sizes can be split: for the
mesh `mode_problem`, for the model `Layout.problems`, for the batch `indivisible_batch`.

Pipeline parallelism, which doesn't exist yet, would start at `run_blocks` in
`rungs/model/blocks.py`, whose scan over stacked layers the stages would split, and at the loop over
microbatches in `rungs/step/gradients.py`; the stacked axis of layers has no name in `axes` yet, by
which `Layout.spec` splits arrays."""
