"""Saved state: checkpoints and weight files, written, verified, listed, restored.

    checkpoint_folder  all checkpoints of a run: best, latest, retention, restore, load_model
    listing            what there is to say of each checkpoint
    manifest           meta.json of one checkpoint: what it records, checksums, damage
    saver              write checkpoints in the background while training continues
    weights_file       model.safetensors, whole or in shards
    weights_index      which tensor is in which file
    merged_weights     weights with LoRA merged in
    start_from         the weights that `start_from` names

Imports `common`, `config`, `data`, `run`, `parallel`, `model`, `optim` and `step`.
"""
