"""Check a model as training starts it."""
