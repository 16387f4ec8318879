"""What each layer does while it trains: `watch_interval` in `train.json`.

    watch          the hook of the training loop: measures due steps, and records them
    program        the compiled measurement: the same step on copies, beside the step itself
    arrays         size of weights, gradients and updates
    spectrum       largest singular values
    activations    size of activations, attention of each head, dead units
    warnings       attention logits that grow

`rungs/run/layer_record.py` has the file, which charts and the page read without JAX."""
