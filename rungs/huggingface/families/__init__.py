"""Families of models, a file for each group of similar ones: GPT-2, Llama, Gemma, …

    family    the `Family` class: config keys and tensor names, used for import and for export
    gpt2      GPT-2
    llama     Llama, Mistral, Mixtral, Qwen 2 and Qwen 3
    gemma     Gemma 1, 2 and 3
    registry  the table of all families

To add a family:

0. Compare the model with the keys in `rungs/config/model_config.py`. A normalization, projection or
   activation that isn't a key yet comes first, there and in `rungs/model/`.
1. Write a `Family` in the file of the most similar one, or in a new file. Take keys, defaults and
   tensor names from transformers: `models/<model_type>/configuration_*.py` and `modeling_*.py`.
2. Add it to `FAMILIES` in `registry.py`.
3. Add a small random model of it to `VARIANTS` in `tests/fixtures/make_models.py`, and write its
   files with `uv run tests/fixtures/make_models.py NAME`. The tests then compare every hidden state
   with transformers, and check that export gives back the same tensors.
4. Add a published config of it, and what it means, to `tests/support/published_configs.py`."""
