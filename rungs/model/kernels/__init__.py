"""Operations computed in a special way to be fast, each equal to a plain form.

blockwise_attention  attention a block of queries at a time, with its own gradient
cudnn_attention      cuDNN's fused attention on NVIDIA GPUs
cross_entropy        head and loss a chunk of tokens at a time, without all logits at once
matmul               matmuls whose gradients take the compute dtype
"""
