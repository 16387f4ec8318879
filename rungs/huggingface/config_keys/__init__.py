"""Map keys of a Hugging Face `config.json` to keys of `model.json` and back.

keys            one key with the same value, a flag, a choice, a fixed value
attention_keys  the keys of rotary positions and sliding-window attention"""
