"""Two launches whose programs do different things: each takes one token and one of the products.

Pairs are read as two tiles, wherever the layout puts them, so that norms and rotation happen in
registers whatever it is. Roundings between operations are those of the operations.

P pairs from a column on, BP the power of two that holds them; other B-names are powers of two that
hold what is named behind the B. See `raw` for the rest.
"""

import triton
import triton.language as tl


@triton.jit
def pair(p, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Which columns pair p is made of."""
    if INTERLEAVED:
        a, b = 2 * p, 2 * p + 1
    else:
        a, b = p, P + p
    return a, b


@triton.jit
def turned(a, b, cos, sin):
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def rms_normed(x, weight, out, eps, D: tl.constexpr, BD: tl.constexpr):
    """Of one row; rounded before it meets the weight."""
    d = tl.arange(0, BD)
    wide = tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    rounded = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + d, (rounded * w).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def rotated(x, out, cos, sin, P: tl.constexpr, BP: tl.constexpr, INTERLEAVED: tl.constexpr):
    """All pairs of one row."""
    p = tl.arange(0, BP)
    first, second = pair(p, P, INTERLEAVED)
    a = tl.load(x + first, mask=p < P, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=p < P, other=0.0).to(tl.float32)
    c = tl.load(cos + p, mask=p < P, other=0.0)
    s = tl.load(sin + p, mask=p < P, other=0.0)
    a, b = turned(a, b, c, s)
    tl.store(out + first, a.to(out.dtype.element_ty), mask=p < P)
    tl.store(out + second, b.to(out.dtype.element_ty), mask=p < P)


@triton.jit
def layer_normed(x, mean, scale, weight, bias, d, inside, out):
    """Centred numbers of a row as layer_norm leaves them: rounded, and wide again."""
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    return ((x - mean) * scale * w + shift).to(out.dtype.element_ty).to(tl.float32)


@triton.jit
def index_key(
    x, weight, bias, out, cos, sin, eps, D: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    BREST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Layer norm of one row, whose first pairs are rotated."""
    p, rest = tl.arange(0, BP), 2 * P + tl.arange(0, BREST)
    first, second = pair(p, P, INTERLEAVED)
    here, there = p < P, rest < D
    a = tl.load(x + first, mask=here, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=here, other=0.0).to(tl.float32)
    r = tl.load(x + rest, mask=there, other=0.0).to(tl.float32)
    mean = (tl.sum(a, 0) + tl.sum(b, 0) + tl.sum(r, 0)) / D
    squares = tl.where(here, (a - mean) * (a - mean) + (b - mean) * (b - mean), 0.0)
    others = tl.where(there, (r - mean) * (r - mean), 0.0)
    scale = tl.rsqrt((tl.sum(squares, 0) + tl.sum(others, 0)) / D + eps)
    a = layer_normed(a, mean, scale, weight, bias, first, here, out)
    b = layer_normed(b, mean, scale, weight, bias, second, here, out)
    r = layer_normed(r, mean, scale, weight, bias, rest, there, out)
    c = tl.load(cos + p, mask=here, other=0.0)
    s = tl.load(sin + p, mask=here, other=0.0)
    a, b = turned(a, b, c, s)
    tl.store(out + first, a.to(out.dtype.element_ty), mask=here)
    tl.store(out + second, b.to(out.dtype.element_ty), mask=here)
    tl.store(out + rest, r.to(out.dtype.element_ty), mask=there)


@triton.jit
def store_latents(
    LATENT, LATENT_WEIGHT, LATENT_OUT, ROW, ROW_WEIGHT, ROWS, KEY, KEY_WEIGHT, KEY_BIAS, KEYS,
    COS, SIN, SLOT, latent_eps, row_eps, key_eps, latent_token, row_token, key_token,
    Q: tl.constexpr, L: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr,
    BL: tl.constexpr, BP: tl.constexpr, BREST: tl.constexpr, ROW_INTERLEAVED: tl.constexpr,
    KEY_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    cos, sin = COS + t * P, SIN + t * P
    if job == 0:
        latent = LATENT + t * latent_token
        rms_normed(latent, LATENT_WEIGHT, LATENT_OUT + t * Q, latent_eps, Q, BQ)
    elif job == 1:
        row = ROW + t * row_token
        stored = ROWS + tl.load(SLOT + t).to(tl.int64) * (L + 2 * P)
        rms_normed(row, ROW_WEIGHT, stored, row_eps, L, BL)
        rotated(row + L, stored + L, cos, sin, P, BP, ROW_INTERLEAVED)
    else:
        if KEY is not None:
            kept = KEYS + tl.load(SLOT + t).to(tl.int64) * D
            index_key(
                KEY + t * key_token, KEY_WEIGHT, KEY_BIAS, kept, cos, sin, key_eps,
                D, P, BP, BREST, KEY_INTERLEAVED,
            )  # fmt: skip


@triton.jit
def rotated_heads(
    x, out, cos, sin, x_head, out_head, H: tl.constexpr, P: tl.constexpr, BH: tl.constexpr,
    BP: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """All pairs of every head of one token."""
    h, p = tl.arange(0, BH)[:, None], tl.arange(0, BP)[None, :]
    first, second = pair(p, P, INTERLEAVED)
    inside = (h < H) & (p < P)
    a = tl.load(x + h * x_head + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + h * x_head + second, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + p, mask=p < P, other=0.0)
    s = tl.load(sin + p, mask=p < P, other=0.0)
    a, b = turned(a, b, c, s)
    tl.store(out + h * out_head + first, a.to(out.dtype.element_ty), mask=inside)
    tl.store(out + h * out_head + second, b.to(out.dtype.element_ty), mask=inside)


@triton.jit
def head_weights(
    X, WEIGHT, OUT, scale, program, tokens, x_token, H: tl.constexpr, E: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """One head's weight for a few tokens. Loads of all columns are on their way at once."""
    head = program % H
    t = program // H * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    x = X + t.to(tl.int64)[:, None] * x_token + e[None, :]
    total = tl.zeros([BT, BE], tl.float32)
    for start in tl.static_range(0, E, BE):
        inside = start + e < E
        w = tl.load(WEIGHT + head * E + start + e, mask=inside, other=0.0).to(tl.float32)
        here = (t < tokens)[:, None] & inside[None, :]
        total += tl.load(x + start, mask=here, other=0.0).to(tl.float32) * w[None, :]
    tl.store(OUT + t * H + head, tl.sum(total, 1) * scale, mask=t < tokens)


@triton.jit(do_not_specialize=["tokens"])
def turn_queries(
    QUERY, ABSORBED, INDEX, INDEX_OUT, X, WEIGHT, WEIGHTS, COS, SIN, scale, tokens, query_token,
    index_token, x_token, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
    IH: tl.constexpr, ID: tl.constexpr, E: tl.constexpr, BH: tl.constexpr, BIH: tl.constexpr,
    BP: tl.constexpr, BREST: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
    INTERLEAVED: tl.constexpr, INDEX_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    t = (program % tokens).to(tl.int64)
    cos, sin = COS + t * P, SIN + t * P
    if program < tokens:
        query = QUERY + t * query_token + (D - 2 * P)
        absorbed = ABSORBED + t * H * C + (C - 2 * P)
        rotated_heads(query, absorbed, cos, sin, D, C, H, P, BH, BP, INTERLEAVED)
    else:
        if INDEX is not None:
            if program < 2 * tokens:
                index, out = INDEX + t * index_token, INDEX_OUT + t * IH * ID
                rotated_heads(index, out, cos, sin, ID, ID, IH, P, BIH, BP, INDEX_INTERLEAVED)
                h, rest = tl.arange(0, BIH)[:, None], 2 * P + tl.arange(0, BREST)[None, :]
                there = (h < IH) & (rest < ID)
                at = h * ID + rest
                tl.store(out + at, tl.load(index + at, mask=there), mask=there)
            else:
                head_weights(
                    X, WEIGHT, WEIGHTS, scale, program - 2 * tokens, tokens, x_token, IH, E, BT, BE
                )
