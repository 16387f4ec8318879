"""Saved state: checkpoints and weights files, written, verified, listed, restored.

checkpoint_folder  a run's checkpoints: list and average them, find the newest valid or the best,
                   the links `best` and `latest`; which old ones are deleted (`keep_checkpoints`),
                   cleanup after a crash; resolve a path to its weights file
saver              write checkpoints in the background while training continues
manifest           meta.json of a checkpoint, with checksums; SHA256SUMS of an imported model
optimizer_state    write and read the optimizer state
load               load_model, load_tokenizer, load_generator; saved weights with LoRA merged;
                   a start of a run; the weights of `start_from`; saved arrays onto devices
published          the files that a model was published with besides its weights; which tokens end
                   its texts
weights_file       model.safetensors, in one file or in shards, written tensor by tensor

To add a key to meta.json, add it to `CheckpointMeta` in `manifest.py`, with a default. What is
measured comes from the call in `training/trainer.py`, what follows from config or mesh from
`describe_checkpoint` in `saver.py`. Its checksum is that of all keys, so a key that older
checkpoints lack is also in `_ADDED_KEYS`."""
