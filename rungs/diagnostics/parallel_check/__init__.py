"""Compare the first steps in every sharding mode with one device."""
