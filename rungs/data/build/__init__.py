"""Builders of datasets: each has a function that writes the files of a dataset into its folder.

text_dataset        text; the source of Python's standard library
pair_dataset        prompts with answers
chat_dataset        chats
preference_dataset  a chosen and a rejected answer to each prompt, or one that is desirable or not
tokens_dataset      token files of other programs (.npy, .safetensors, .bin): a new format goes here
task_dataset        the tasks of reinforcement learning
near_duplicates     a dataset without near-duplicates of another
document_dataset    documents, in a build that can be killed and resumed
document_files      files of documents, local or on the hub
sections            ranges of text and of JSON lines in the user's files; training and
                    validation; the token file of each split"""
