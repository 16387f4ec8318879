"""Saved state: checkpoints and weights files, written, verified, listed, restored.

    checkpoint_folder  the checkpoints of a run: list them, find the newest valid or the best one
    links              the links `best` and `latest`
    retention          which old checkpoints are deleted (`keep_checkpoints`), cleanup after a crash
    listing            the table that `checkpointing.py` prints
    saver              write checkpoints in the background while training continues
    manifest           meta.json of one checkpoint: what it records, checksums, damage
    checksums          sha256 of files; SHA256SUMS, the checksums of an imported model
    optimizer_state    write, read and check the optimizer state, at any path
    restore            saved arrays onto devices: resume, or start from saved weights
    load               load_model, load_tokenizer, and find the weights that a path stands for
    published          the files that a model was published with besides its weights
    text_generator     load_generator: from texts to the texts that continue them
    start_from         the weights that `start_from` in train.json names
    weights_file       model.safetensors, in one file or in shards
    tensor_writer      write a safetensors file tensor by tensor
    weights_index      which tensor is in which file
    merged_weights     weights with LoRA merged in

Imports `common`, `config`, `data`, `run`, `parallel`, `model`, `optim` and `step`.
"""
