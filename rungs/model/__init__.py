"""The decoder: layers, attention, positions, generation.

    gpt            GPT, the whole model, reads top to bottom as a transformer
    layers         Linear, Embedding, norms, dropout, initializers
    rope           rotary positions
    attention      attention, its masks, windows and cache
    feed_forward   feed-forward layers and mixture of experts
    lora           low-rank adapters
    remat          what the backward pass keeps and what it recomputes
    generation     generate text from a model, batched and streamed
    sampling       temperature, top-k, top-p, min-p, repetition penalty
    kernels/       operations with a special fast form: attention, cross-entropy, matmul gradients

Imports `common`, `config` and `parallel`.
"""
