"""What is computed in a special way to be fast."""
