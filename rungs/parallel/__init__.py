"""Sharing work between devices and processes: mesh, sharding modes, collectives, process setup.

    jax_setup      environment and flags set before JAX starts; compilation cache
    launchers      find the cluster a process is part of: Slurm, Open MPI, Kubernetes, TPU pods
    processes      join, broadcast, agree between processes
    devices        which devices a run uses
    target_device  the device a program is traced for: the one here, or a planned one
    mesh           the mesh and the sharding modes: which array axis goes on which mesh axis
    axes           names of mesh axes, of parts of the model and of parameters
    collectives    psum and its kin inside shard_map
    fsdp           gather a layer's weights when they are used

Imports `common` and `config`.
"""
