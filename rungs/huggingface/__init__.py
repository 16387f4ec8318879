"""Published models in and out: import, export, comparison with transformers.

    importing, exporting              a run folder from a Hugging Face model, and back
    import_tokenizer, export_tokenizer
    comparison                        hidden states next to those of transformers
    families/                         one file per family: GPT-2, Llama, Gemma, …; add one here
    config_keys/                      config.json keys to model.json keys and back
    tensors/                          tensor names and shapes; readers and writers of weight files

Imports `common`, `config`, `data`, `run`, `model`, `parallel`, `step` and `checkpointing`.
"""
