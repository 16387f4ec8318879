"""Datasets of chats, in the format of the model's own chat template.

messages              reads a file of chats: `messages` or ShareGPT's `conversations`
chat_template         renders a chat as text, and finds the assistant's answers in it
template_environment  Jinja's sandbox, in which templates are compiled
chat_dataset          tokenizes chats, marks the tokens that the loss counts, writes the dataset
preference_dataset    likewise for pairs of a chosen and a rejected answer, texts or chats"""
