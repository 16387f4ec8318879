"""From text to batches.

catalog     open a dataset by name; build or download it if it is missing
build       a builder for each kind of source
text        tokenizers and chats
tokens      token files, datasets, and the batches of a run
overlap     how much of the validation split is also in training
provenance  what a checkpoint records about its data"""
