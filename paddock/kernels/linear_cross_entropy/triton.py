"""What lies between the products of lm_loss, a row of float32 logits at a time. V vocabulary."""

import triton
import triton.language as tl


@triton.jit
def loss(logit, target, lse, nll, sharpness, V, BLOCK: tl.constexpr):
    """logsumexp of a row times `sharpness`, and how far its target lies below."""
    r = tl.program_id(0).to(tl.int64)
    logit += r * V
    top = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(logit + v, mask=v < V, other=-float("inf")) * sharpness
        new = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(z - new), 0)
        top = new
    found = top + tl.log(total)
    tl.store(lse + r, found)
    tl.store(nll + r, found - tl.load(logit + tl.load(target + r)) * sharpness)


@triton.jit
def gradient(logit, target, lse, above, grad, sharpness, V, BLOCK: tl.constexpr):
    """d nll / d logit = (softmax - one hot), times what comes from above."""
    r = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logit + r * V + v, mask=v < V, other=0.0) * sharpness
    share = tl.exp(z - tl.load(lse + r)) - tl.where(v == tl.load(target + r), 1.0, 0.0)
    found = share * (tl.load(above + r) * sharpness)
    tl.store(grad + r * V + v, found.to(grad.dtype.element_ty), mask=v < V)
