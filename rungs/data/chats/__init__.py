"""Datasets of chats, in the format of the model's own chat template.

messages          the chats of a file: `messages` or ShareGPT's `conversations`
chat_template     render a chat as a text, and find what the assistant says in it
template_process  the process in which templates run
template_sandbox  its program: a template's text, in Jinja, within limits of time and memory
chat_dataset      tokenize chats and write the dataset
"""
