"""Operations with a faster implementation than the plain form, and the same result.

blockwise_attention  causal attention, one block of queries at a time
cudnn_attention      causal attention by cuDNN, on NVIDIA GPUs
cross_entropy        output head and weighted loss, one chunk of tokens at a time
float8               matmul of activations with weights in FP8
gated_delta          the gated delta rule, by chunks or token by token
grouped_matmul       matmul of each row with its group's matrix, on NVIDIA GPUs
matmul               matmul with weights whose backward pass stays in the compute dtype
mosaic_attention     causal attention by tokamax's Pallas kernels, on Hopper and Blackwell GPUs
norms                the arithmetic of layer norm and RMS norm; their own derivative on GPUs
splash_attention     causal attention by JAX's Pallas kernels, on TPUs
stored_matrix        matrices in the forms used by generation: 16 bits, int8
triton_attention     causal attention by our own Pallas kernels, on NVIDIA GPUs"""
