"""Published models, in the form of the Hugging Face ecosystem: what `pretrained.py` works with."""
