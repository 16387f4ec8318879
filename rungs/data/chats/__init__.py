"""Datasets of chats, in the format of the model's own chat template.

messages          the chats of a file: `messages` or ShareGPT's `conversations`
chat_template     render a chat as a text, and find what the assistant says in it
template_sandbox  compile a template, in Jinja
chat_dataset      tokenize chats and write the dataset
"""
