"""Families of models, a file for each group of similar ones: GPT-2, Llama, Gemma, …

    family    the `Family` class: config keys and tensor names, used for import and for export
    gpt2      GPT-2
    llama     Llama, Mistral, Mixtral, Qwen 2, Qwen 3 with experts or without, SmolLM3
    gemma     Gemma 1, 2 and 3
    olmo      OLMo 2 and 3
    registry  the table of all families

To add a family, see CONTRIBUTING.md. If its norm placement, bias or activation isn't a key of
`config/model_config.py`, the key comes first, with `model/blocks.py` or `model/attention.py`.
"""
