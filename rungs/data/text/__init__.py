"""Text as tokens.

tokenizer        encode and decode text; train a BPE tokenizer
tokenizer_files  load a tokenizer from a folder or the hub; special tokens, ends of texts
batch_encoder    encode many texts fast
stop_strings     find the strings that end a text
messages         the messages of a chat
tool_calls       calls of tools in what a model wrote
chat_template    render a chat as text; a built-in template is a file in chat_templates/"""
