"""Tensor functions. Each op is a folder: a contract, a reference that defines it, a fast twin.

dense_attention/  causal attention over expanded heads, by PyTorch's own kernels
gated_delta/      the gated delta rule, token by token and in chunks
grouped_gemm/     one matrix product per expert
hadamard/         orthonormal Walsh-Hadamard transform
index_kl/         how far the indexer is from where attention looks
index_scores/     how well each key answers each query (the lightning indexer)
latent_decode/    dense attention in latent space, for few queries
lm_loss/          output projection and cross-entropy without full logits
newton_schulz/    pushes singular values towards one
norm/             RMS and layer normalisation
precision.py      which precision sums are computed in
rope/             rotary positions in both layouts
sparse_mla/       latent attention over a chosen few rows
spans.py          which keys the queries of a packed step may see
topk/             which keys to keep, the same ones every time
workspace.py      how much scratch memory a reference may hold at once
"""
