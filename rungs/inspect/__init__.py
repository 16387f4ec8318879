"""What happens inside a model. Two words, two meanings: *watch* measures layers while they train,
*look* shows what a model does with one text.

    watch              the hook of the training loop (`watch_interval`): measures due steps
    watch_program      the compiled measurement: the same step on copies, beside the step itself
    watch_arrays       size of weights, gradients and updates
    spectrum           largest singular values
    watch_activations  size of activations, attention of each head, dead units
    watch_warnings     attention logits that grow
    look               `rungs.look`: attention maps, predictions after each layer, losses
    look_contributions what each head and feed-forward layer adds to a logit
    patch              `rungs.patch`: a model whose activations go through functions
    places             named places of a model; the module that reads or changes what passes there

`rungs/run/layer_record.py` has the file of measurements, `rungs/report/look_page.py` the page of a
look."""
