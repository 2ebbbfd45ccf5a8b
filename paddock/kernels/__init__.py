"""Tensor functions. Each op is a folder: a contract, a reference that defines it, a fast twin.

compile.py        CUDA C++ sources, compiled when first used and kept on disk
dense_attention/  causal attention over expanded heads, to every key or to kept ones
expert_topk/      which experts a token goes to: the best of a few
fused_experts/    routed experts of few tokens
gated_delta/      the gated delta rule, token by token and in chunks
cuda_graphs.py    a device's work, recorded once and repeated
gqa_decode/       grouped-query attention of few queries behind a past
grouped_gemm/     one matrix product per expert
hadamard/         orthonormal Walsh-Hadamard transform
index_kl/         how far the indexer is from where attention looks
index_scores/     how well each key answers each query (the lightning indexer)
mla_decode/       attention in latent space, for few queries
mla_prepare/      norms, rotation and storage of a latent layer that decodes
linear_cross_entropy/  output projection and cross-entropy without full logits
moe_permute/      rows sorted by expert, and back to tokens
newton_schulz/    pushes singular values towards one
norm/             RMS and layer normalisation
block_table.py    where the keys of a batch of sequences lie
precision.py      which precision sums are computed in
rope/             rotary positions in both layouts
sparse_mla/       latent attention over a chosen few rows
spans.py          which keys the queries of a packed step may see
swiglu/           the gated activation of a feed-forward layer
topk/             which keys to keep, the same ones every time
dispatch.py       which fast twins may be used
w4a8_gemm/        integer products: int8 activations, int4 or int8 weights
linear_fp32/      a linear map in float32, for few outputs that decide much
workspace.py      how much scratch memory a reference may hold at once
"""
