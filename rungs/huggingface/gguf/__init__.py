"""GGUF, the file format of llama.cpp: a model with its tokenizer and chat template in one file
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

architectures  llama.cpp's architectures as families: metadata keys and tensor names
vocabulary     tokenizer to metadata, and back
reading        a file as what the importer takes
writing        a run as a file: dtypes and quantizations (with `GGUFDtype` in `option_values`)
"""
