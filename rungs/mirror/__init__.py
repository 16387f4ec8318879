"""Copy a run off its machine (`train.py RUN --mirror s3://bucket/run`), and restore it from there.

    mirror_folder  files at a URL, through fsspec; mirror.json, which identifies the run
    mirroring      uploads new and changed files in a thread while training continues; restores a
                   run folder from its mirror on another machine

A mirror has the run folder's files under the same names, without `aside/` and locks. A checkpoint's
`meta.json` is uploaded last, so, as on disk, a checkpoint that has one is complete."""
