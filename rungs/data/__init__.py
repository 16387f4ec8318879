"""From text to batches: tokenizers, dataset sources, dataset folders, the batch of each step.

    bpe           train a BPE tokenizer
    tokenizer     encode and decode
    tokenizer_files, tokenizer_config, sentencepiece_model   load a tokenizer from its files
    python_stdlib, text_dataset, pair_dataset, hub_dataset   sources: each builds a dataset folder
    dataset       a dataset folder and its dataset.json
    token_file    one file of tokens, written and read in slices
    catalog       open a dataset by name; build or download it if it is absent
    loader        the batch of a step, a pure function of config and step; validation batches
    provenance    what a checkpoint records of the data

Imports `common` and `config`.
"""
