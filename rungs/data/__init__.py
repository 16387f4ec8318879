"""From text to batches: dataset builders, tokenizers, the batches of a run.

Build a dataset folder (`download_dataset.py` calls these through `catalog`):
    text_dataset     BPE dataset builder: split text files, train a BPE tokenizer, write tokens
    pair_dataset     dataset builder for prompts with answers
    chats            dataset builder for chats, and chat templates
    json_lines       lines of JSON, for pairs and chats
    python_stdlib    dataset builder for the source of Python's standard library
    documents        dataset builder for files of documents, on the hub or local
    task_dataset     dataset builder for the tasks of reinforcement learning
    hub_dataset      download a dataset of tokens from the Hugging Face hub

Open a dataset folder:
    catalog          open a dataset by name; build or download it if it is missing
    dataset          a dataset folder and its dataset.json
    token_file       one file of tokens, written and read in slices

    split_documents  the documents of a split as texts
    overlap          how much of the validation split is in training, too

Tokenize:
    tokenizer            encode and decode text
    batch_encoder        encode many texts fast
    bpe                  train a BPE tokenizer
    tokenizer_files      load a tokenizer from a folder or the hub
    tokenizer_config     read tokenizer_config.json
    published_ends       which tokens end a text, by the files a tokenizer was published with
    settled_text         which decoders only add to a text as tokens arrive
    sentencepiece_model  convert a SentencePiece tokenizer.model

Make batches:
    loader           the batch of a training step, and validation batches
    sequences        slice text into sequences, mix datasets
    pair_sequences   pairs and chats as sequences, padded or packed
    checks           check that the config fits the datasets
    provenance       what a checkpoint records about its data

Imports `common` and `config`.
"""
