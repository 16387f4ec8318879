"""A copy of a run off its machine: `train.py RUN --mirror s3://bucket/run`, and the way back.

    mirror_folder    files on the other side of a URL, through fsspec: list, upload, download, move
    upload_progress  when an upload last moved on
    mirror_record    mirror.json: which run a mirror is of, and what of it was copied already
    copier           what the mirror lacks, and copying it
    mirroring        the thread that copies each new checkpoint while training continues
    restoring        a run folder from its mirror, on a machine that has none

A mirror has the files of the run folder under the same names, without `aside/` and locks. The
`meta.json` of a checkpoint is uploaded last. So, as on disk, a checkpoint that has one is complete.

Imports `common`, `run` and `checkpointing`.
"""
