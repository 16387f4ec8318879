"""The decoder: layers, attention, positions, generation.

    gpt            GPT, the model: embedding, blocks, final norm, output head, loss
    blocks         a block of attention and feed-forward; the scan over all blocks
    attention      attention, its masks, sliding windows and key/value cache
    latent_attention  attention whose cache holds a latent per token (DeepSeek-V2)
    delta_net      Gated DeltaNet, linear attention in the place of attention
    feed_forward   feed-forward layers and mixture of experts
    router         which experts a token goes through
    positions      position embeddings (learned, sinusoidal) and rotary positions (RoPE)
    layers         Linear, Embedding, norms, dropout, initializers
    prediction     DeepSeek-V3's module that predicts the token after the next
    lora           LoRA adapters
    remat          what the backward pass keeps or recomputes; resolves "auto", also of scan_unroll
    decoding       generates tokens one at a time with a key/value cache
    lookahead      speculative decoding with drafts from the text (prompt lookup)
    generation     generates text, batched and streamed; conversations in a chat template
    unmasking      generates text with a bidirectional model, which fills in masked tokens
    rollouts       samples texts with log-probabilities, for reinforcement learning
    weight_formats  weights for generation: in a dtype, or quantized to 8 bits
    sampling       greedy, temperature, top-k, top-p, min-p, repetition penalty, each for one
                   setting and row by row; stop tokens
    kernels/       faster forms of attention, cross-entropy, norms and matmul

A new architecture option starts with a key in `config/model_config.py`."""
