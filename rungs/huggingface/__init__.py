"""Import, export and upload Hugging Face models, and compare imports with transformers.

families/           families of models: GPT-2, Llama, Gemma, …; add a family here
gguf/               the same for GGUF, the file format of llama.cpp
config_keys         keys of config.json and of model.json: the same value, a flag, a choice
attention_keys      the same for rotary positions and sliding-window attention
deepseek_keys       those of DeepSeek that need more than another name
hybrid_keys         those of models with Gated DeltaNet
mxfp4               read weights in MXFP4
tensors             read tensors from safetensors files; split and join them by a family's rules
presets             published models of every size, to train from scratch; add one to presets.json
importing           make a run folder from a Hugging Face model or a GGUF file
exporting           write a Hugging Face model from a run folder or checkpoint; LoRA as an
                    adapter for peft
jax_gpt2            run folders of jax-gpt2-from-scratch: read and write its weights
model_card          the README of an uploaded model on the hub
hf_tokenizer        the tokenizer files of imported and exported models
transformers_check  compare hidden states, logits and token ids with transformers
transformers_program  run transformers for that, in a Python that has it"""
