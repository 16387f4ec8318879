"""Tokens as batches.

token_file     train.safetensors, the format that training reads, written and read in slices
dataset        a dataset folder and its dataset.json
packing        which documents share a sequence
sequences      text, pairs and chats as sequences; mixtures of datasets, also changing ones
loader         the batch of a step, validation batches; checks that config and datasets fit
stored_arrays  what a teacher or a reference computes for the sequences"""
