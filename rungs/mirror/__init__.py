"""Copy a run off its machine (`train.py RUN --mirror s3://bucket/run`), and restore it from there.

    mirror_folder  files at a URL, through fsspec; mirror.json, which says which run they are of
    mirroring      copying what the mirror lacks, in a thread while training continues
    restoring      a run folder from its mirror, on a machine that has none

A mirror has the files of the run folder under the same names, without `aside/` and locks. The
`meta.json` of a checkpoint is uploaded last. So, as on disk, a checkpoint that has one is complete.

Imports `common`, `run` and `checkpointing`."""
