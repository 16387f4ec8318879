"""From text to batches: dataset builders, tokenizers, the batches of a run.

Build a dataset folder (`catalog` calls these for `download_dataset.py`):
    builders   text, pairs, tokens, the standard library, tasks
    chats      chats, chat templates, and preferences
    documents  files of documents, local or on the hub

Open a dataset folder:
    catalog     open a dataset by name; build or download it if it is missing
    dataset     a dataset folder and its dataset.json
    token_file  one file of tokens, written and read in slices
    overlap     how much of the validation split is also in training
Tokenize:
    tokenizer            encode and decode text
    batch_encoder        encode many texts fast
    bpe                  train a BPE tokenizer
    tokenizer_files      load a tokenizer from a folder or the hub; special tokens, ends of texts

Make batches:
    loader         the batch of a step, validation batches; checks that config and datasets fit
    sequences      text, pairs and chats as sequences; mixtures of datasets, also changing ones
    stored_arrays  what a teacher or a reference computes for the sequences
    provenance     what a checkpoint records about its data"""
