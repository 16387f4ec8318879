"""Saved state: checkpoints and weights files, written, verified, listed, restored.

    checkpoint_folder  the checkpoints of a run: list them, find the newest valid or the best one,
                       the links `best` and `latest`; the weights file that a path stands for
    retention          which old checkpoints are deleted (`keep_checkpoints`), cleanup after a crash
    saver              write checkpoints in the background while training continues
    manifest           meta.json of one checkpoint: what it records, checksums, damage; SHA256SUMS,
                       the checksums of an imported model
    optimizer_state    write, read and check the optimizer state, at any path
    load               load_model, load_tokenizer, load_generator; saved weights with LoRA merged;
                       the weights that `start_from` in train.json names; saved arrays onto devices
    published          the files that a model was published with besides its weights
    weights_file       model.safetensors, in one file or in shards, written tensor by tensor

Imports `common`, `config`, `data`, `run`, `parallel`, `model`, `optim` and `step`."""
