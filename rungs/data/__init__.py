"""From text to batches: dataset builders, tokenizers, the batches of a run.

Build a dataset folder (`download_dataset.py` calls these through `catalog`):
    text_dataset   dataset builder for text; lines of JSON and splits, for pairs and chats as well
    pair_dataset   dataset builder for prompts with answers
    chats          dataset builder for chats, and chat templates
    documents      dataset builder for files of documents, on the hub or local
    python_stdlib  dataset builder for the source of Python's standard library
    task_dataset   dataset builder for the tasks of reinforcement learning
    hub_dataset    download a dataset of tokens from the Hugging Face hub

Open a dataset folder:
    catalog     open a dataset by name; build or download it if it is missing
    dataset     a dataset folder and its dataset.json
    token_file  one file of tokens, written and read in slices
    overlap     how much of the validation split is also in training

Tokenize:
    tokenizer            encode and decode text
    batch_encoder        encode many texts fast
    bpe                  train a BPE tokenizer
    tokenizer_files      load a tokenizer from a folder or the hub
    tokenizer_config     the files beside a tokenizer: special tokens, what ends a text
    sentencepiece_model  convert a SentencePiece tokenizer.model

Make batches:
    loader      the batch of a step, validation batches; checks that config and datasets fit
    sequences   text, pairs and chats as sequences; mixtures of datasets
    provenance  what a checkpoint records about its data

Imports `common`, `config` and `tasks`."""
