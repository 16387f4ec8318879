"""Keys of `config.json` mapped to keys of `model.json` and back."""
