"""Datasets of chats, in the format of the model's own chat template.

messages          the chats of a file: `messages` or ShareGPT's `conversations`
chat_template     render a chat as a text, and find what the assistant says in it
template_sandbox  the program that runs templates: Jinja within limits of time and memory
chat_dataset      tokenize chats and write the dataset"""
