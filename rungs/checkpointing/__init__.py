"""Saved state: checkpoints and weights files, written, verified, listed, restored.

checkpoint_folder  a run's checkpoints: list and average them, find the newest valid or the best,
                   the links `best` and `latest`; resolve a path to its weights file
retention          which old checkpoints are deleted (`keep_checkpoints`), cleanup after a crash
saver              write checkpoints in the background while training continues
manifest           meta.json of a checkpoint, with checksums; SHA256SUMS of an imported model
optimizer_state    write and read the optimizer state
load               load_model, load_tokenizer, load_generator; saved weights with LoRA merged;
                   the weights of `start_from`; saved arrays onto devices
starting_point     what a start of a run begins with: its checkpoint, or its weights
published          the files that a model was published with besides its weights
weights_file       model.safetensors, in one file or in shards, written tensor by tensor"""
