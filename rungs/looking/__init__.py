"""What a model does inside: read its activations, and change them.

    places         named places of a model; the module that reads or changes what passes there
    patch          `rungs.patch`: a model whose activations go through functions
    look           `rungs.look`: attention maps, predictions after each layer, losses
    contributions  what each head and feed-forward layer adds to a logit

Nothing here is in the path of training and generation: a `Hooked` module takes the place of another
in a copy of the model. The page of `model.py --look` is `rungs/page/look_document.py`."""
