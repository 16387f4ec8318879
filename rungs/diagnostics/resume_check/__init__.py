"""Compare a training that is killed and resumed with one that is not."""
