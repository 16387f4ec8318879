"""Published tensors: rules for names and shapes, and readers and writers of their files."""
