"""Sharing work between devices and processes: sharding modes, mesh, collectives, process setup.

    sharding       the sharding modes (`MESH_AXES`); where arrays and batches live on the mesh
    mesh           the mesh of devices; names of its axes, of array axes, of parts of the model
    devices        choose the devices of a run
    fsdp           all-gather sharded weights, look up rows of sharded tables, add up gradients
    collectives    psum and others inside shard_map
    launchers      find the cluster a process is part of: Slurm, Open MPI, Kubernetes, TPU pods
    processes      join the processes, also if one is lost; broadcast and agree between them
    jax_setup      what to set before JAX starts: compilation cache, CPU devices, determinism;
                   settings outside of a run's files that bear on its results
    gpu_settings   JAX's share of a GPU's memory; flags of XLA's GPU compiler
    target_device  the kind of device a program is traced for: the local one or a planned one;
                   barriers that keep XLA from fusing, by platform

To add a sharding mode, add its name to `Mode` and the mesh it needs to `mesh_axes`,
`ShardingConfig.sizes` and `mode_problem`, all in `config/sharding_config.py`, and its row to
`MESH_AXES` in `sharding.py`; `planning/memory.py` and `planning/communication.py` plan with these.
Pipeline parallelism, which isn't there, would start at `run_blocks` in `rungs/model/blocks.py`: it
runs the layers, which are stacked along one axis of each weight, as a scan that stages would split.
Imports `common` and `config`."""
