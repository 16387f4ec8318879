"""Builders of datasets: each has a function that writes the files of a dataset into its folder.

    text_dataset    text; the source of Python's standard library
    pair_dataset    prompts with answers
    tokens_dataset  tokens that another program made
    task_dataset    the tasks of reinforcement learning
    sections        ranges of text and of JSON lines in the user's files; training and validation;
                    the token file of each split

Others are in `rungs/data/chats` and `rungs/data/documents`."""
