"""Tensor operations. Each op is a folder: a contract, a reference that defines it, and kernels.

block_table.py    block table: which storage slots hold the keys of each sequence
compile.py        CUDA C++ compilation with NVRTC, cached on disk
cpu/              C++ kernels for the CPU, compiled on the machine
cuda_graphs.py    CUDA graph capture and replay
dense_attention/  causal attention over expanded heads, to every key or to selected top-k keys
dispatch.py       which kernels are enabled
expert_topk/      top-k experts of each token
fused_experts/    routed experts for few tokens, as in decoding
gated_delta/      gated delta rule, recurrent and chunked
gqa_decode/       grouped-query attention for paged decode and chunked prefill
grouped_gemm/     grouped GEMM: one matrix product per expert
hadamard/         orthonormal Walsh-Hadamard transform
index_kl/         KL loss of the indexer against the attention distribution
index_scores/     index scores of the lightning indexer
linear/           linear layer
linear_cross_entropy/  output projection and cross-entropy without full logits
linear_fp32/      linear layer in float32, for routers and index head weights
mla_decode/       MLA decode in latent space, dense, paged and sparse
decoder_layer/    a decoder layer in one call, on a CPU
mla_prepare/      fused norm, RoPE and KV cache write of MLA decode
moe_permute/      permutes rows by expert and back to tokens
newton_schulz/    Newton-Schulz orthogonalization for Muon
norm/             RMSNorm and LayerNorm
packed_linear/    linear layers, MLPs and experts with prepacked weights, on a CPU
precision.py      accumulation dtypes
rope/             rotary position embeddings in both layouts
spans.py          query and key spans of a packed step
sparse_mla/       sparse MLA over selected top-k tokens
swiglu/           SwiGLU activation
topk/             deterministic top-k selection of keys by index score
w4a8_gemm/        integer GEMM: int8 activations, int4 or int8 weights
workspace.py      scratch memory budget and chunking of references
"""
