"""Import, export and upload Hugging Face models, and compare imports with transformers.

    families/           families of models: GPT-2, Llama, Gemma, …; add a family here
    config_keys/        mapping between config.json keys and model.json keys
    tensors/            mapping between tensor names and parameters; weight file readers
    importing           make a run folder from a Hugging Face model or a Linen checkpoint
    exporting           write a Hugging Face model from a run folder or checkpoint
    model_card          the README of an uploaded model on the hub
    adapter             LoRA as an adapter for peft
    hf_tokenizer        the tokenizer files of imported and exported models
    transformers_check  compare hidden states with transformers
    transformers_forward  the program that computes hidden states with transformers

Imports `common`, `config`, `data`, `run`, `model`, `parallel`, `step`, `checkpointing` and
`linen`."""
