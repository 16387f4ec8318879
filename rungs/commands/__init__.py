"""What the commands at the root do once their options are read, a module for each.

    options            declares options that several commands have; loads Click only
    grid               `train.py --grid`, `mup.py sweep`: a run per combination of values or rate
    start_command      checks those that train.py and reinforce.py share, and locks the run
    charts             redraw charts, compare runs, show the page of runs
    checkpointing      list and verify checkpoints
    download_dataset   build or download a dataset
    evaluate           loss, perplexity and scores of a checkpoint
    generate           continue prompts or chat
    model              show the model of a run as it is built
    mup                the coordinate check of muP, and the learning-rate sweep
    plan               estimate what a run needs, or propose a ladder of runs
    pretrained         import, export and upload Hugging Face models
    serve              answer over HTTP
    reinforce          train by reinforcement learning, replay a step, audit
    train              train or resume a run, replay a failed step, train a grid

A command at the root declares its options and imports its module here only when it is called, so
`--help` loads only Click. Defaults and choices in help are in `rungs/config/option_values.py`."""
