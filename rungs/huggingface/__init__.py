"""Import, export and upload Hugging Face models, and compare imports with transformers.

families/           families of models: GPT-2, Llama, Gemma, …; add a family here
gguf/               the same for GGUF, the file format of llama.cpp
config_keys         keys of config.json and of model.json: the same value, a flag, a choice
attention_keys      the same for rotary positions and sliding-window attention
tensor_rules        which tensors hold which parameters, for import and export
tensor_groups       the tensors of one model by these rules; splitting and joining them
tensor_reader       read tensors from safetensors or PyTorch files, one at a time
presets             published models of every size, to train from scratch; add one to presets.json
importing           make a run folder from a Hugging Face model or a Linen checkpoint
exporting           write a Hugging Face model from a run folder or checkpoint; LoRA as an
                    adapter for peft
model_card          the README of an uploaded model on the hub
hf_tokenizer        the tokenizer files of imported and exported models
transformers_check  compare hidden states, logits and token ids with transformers
agreement           how near hidden states and logits are to others
tokenizer_check     which texts and chats to encode for that, and where ids differ
transformers_forward, transformers_tokenizer  the programs that run transformers"""
