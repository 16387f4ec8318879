"""Text as tokens.

tokenizer             encode and decode text
tokenizer_files       load a tokenizer from a folder or the hub; special tokens, ends of texts
batch_encoder         encode many texts fast
bpe                   train a BPE tokenizer
messages              the messages of a chat
chat_template         render a chat as text
template_environment  Jinja's sandbox with what transformers gives chat templates"""
