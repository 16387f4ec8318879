"""Mapping between keys of a Hugging Face `config.json` and keys of `model.json`.

keys            one key with the same value, a flag, a choice, a fixed value
attention_keys  rotary positions and sliding-window attention"""
