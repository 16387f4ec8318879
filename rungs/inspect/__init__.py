"""What happens inside a model. *Watch*: measurements of the layers while they train. *Look*: what a
trained model does with one text.

    watch               the hook of the training loop; the compiled measurement; warnings
    watch_arrays        size of weights, gradients and updates, largest singular values
    watch_activations   size of activations, attention of each head, dead units
    look                `rungs.look`: attention maps, predictions after each layer, losses, and
                        what each head and feed-forward layer adds to a logit
    patch               `rungs.patch`: a model whose activations go through functions

`rungs/run/layer_record.py` has the file of measurements, which the page reads without JAX, and
`rungs/report/look_page.py` the page of `model.py --look`. Looking and patching are not in the path
of training: a `Hooked` module takes the place of another in a copy of the model."""
