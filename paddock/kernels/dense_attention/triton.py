"""Flash attention over packed documents, causal or under a mask of bits, forward and backward.

One launch serves documents of any lengths: a row of `table` tells a program its document (first
query row, first key row, tokens), where in it its block begins, and the number of the document's
first tile. A tile is TILE queries or TILE keys of one document, counted within it.

Under a mask (MASKED) bit s % 32 of word s / 32 in a query's row of `words` says that it keeps key s
of its document; causality is in the bits. For the gradients of keys and values a key's row has the
bits of the queries that keep it. Tiles without a single bit are left out: `lists` names the others.

Scores are kept in base 2: `scale2` is the softmax scale times log2(e), and so is `lse`. lse and
delta have a row for each query of every tile, [H, SLOTS], so that a block finds its own aligned;
where a tile is longer than its document they are infinite and zero.
No atomics: two runs agree bit for bit. D query and key dim, V value dim, BD and BV the powers of
two that hold them, BM queries and BN keys of a block.
"""

import triton
import triton.language as tl

TILE = tl.constexpr(128)
FIELDS = tl.constexpr(5)


@triton.jit
def _block(table, block):
    """The document of this block, where in it the block begins, and the document's first tile."""
    at = table + block * FIELDS
    query0 = tl.load(at).to(tl.int64)
    key0 = tl.load(at + 1).to(tl.int64)
    return query0, key0, tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _rows(x, stride, rows, N: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[N, PADDED]: the first `rows` rows from x on, zeros behind them and beyond WIDTH."""
    n, d = tl.arange(0, N), tl.arange(0, PADDED)
    inside = n[:, None] < rows
    if PADDED != WIDTH:
        inside = inside & (d[None, :] < WIDTH)
    return tl.load(x + n[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def _store(x, stride, rows, value, N: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    n, d = tl.arange(0, N), tl.arange(0, PADDED)
    inside = (n[:, None] < rows) & (d[None, :] < WIDTH)
    tl.store(x + n[:, None] * stride + d[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _kept(words, W, rows, start, N: tl.constexpr, COLUMNS: tl.constexpr):
    """[N, COLUMNS] integers, negative where the bit is set, of the columns from `start` on.

    Two shifts, one by a thread's place and one by a constant, so that a bit costs one operation.
    """
    n, w = tl.arange(0, N), start // 32 + tl.arange(0, COLUMNS // 32)
    inside = (n[:, None] < rows) & (w[None, :] < W)
    word = tl.load(words + n[:, None] * W + w[None, :], mask=inside, other=0)
    turned = word[:, :, None] << (7 - tl.arange(0, 8))[None, None, :]
    sign = turned[:, :, None, :] << (24 - 8 * tl.arange(0, 4))[None, None, :, None]
    return tl.reshape(sign, (N, COLUMNS))


@triton.jit
def softmax_step(top_M, total_M, acc, score, value, scale2):
    """Take in one block of scores, -inf where a key is not seen."""
    new_M = tl.maximum(top_M, tl.max(score, 1) * scale2)
    weight = tl.exp2(score * scale2 - new_M[:, None])
    shrink_M = tl.exp2(top_M - new_M)
    total_M = total_M * shrink_M + tl.sum(weight, 1)
    acc = tl.dot(weight.to(value.dtype), value, acc * shrink_M[:, None])
    return new_M, total_M, acc


@triton.jit
def forward(
    q, k, v, out, lse, words, lists, counts, table,
    scale2, q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, SLOTS, W, LISTED,
    MASKED: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out and lse of one block of queries of one head."""
    query0, key0, length, at, tile0 = _block(table, tl.program_id(0))
    head = tl.program_id(1).to(tl.int64)
    k += head * k_head
    v += head * v_head
    m = at + tl.arange(0, BM)
    n = tl.arange(0, BN)
    row0 = query0 + at
    query = _rows(q + head * q_head + row0 * q_row, q_row, length - at, BM, D, BD)
    # Finite, so that a block in which nothing is kept does not subtract infinity from itself.
    top_M = tl.full((BM,), -1e30, tl.float32)
    total_M = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)
    if MASKED:
        words += row0 * W
        per: tl.constexpr = TILE // BN
        tile = tile0 + at // TILE
        names = lists + tile.to(tl.int64) * LISTED
        for i in range(0, tl.load(counts + tile) * per):
            start = (tl.load(names + i // per) - i // per) * TILE + i * BN
            key = _rows(k + (key0 + start) * k_row, k_row, length - start, BN, D, BD)
            score = tl.dot(query, tl.trans(key))
            kept = _kept(words, W, length - at, start, BM, BN)
            score = tl.where(kept < 0, score, float("-inf"))
            value = _rows(v + (key0 + start) * v_row, v_row, length - start, BN, V, BV)
            top_M, total_M, acc = softmax_step(top_M, total_M, acc, score, value, scale2)
    else:
        for start in range(0, at, BN):
            key = _rows(k + (key0 + start) * k_row, k_row, BN, BN, D, BD)
            score = tl.dot(query, tl.trans(key))
            value = _rows(v + (key0 + start) * v_row, v_row, BN, BN, V, BV)
            top_M, total_M, acc = softmax_step(top_M, total_M, acc, score, value, scale2)
        for start in range(at, tl.minimum(at + BM, length), BN):
            key = _rows(k + (key0 + start) * k_row, k_row, length - start, BN, D, BD)
            score = tl.dot(query, tl.trans(key))
            score = tl.where(m[:, None] >= start + n[None, :], score, float("-inf"))
            value = _rows(v + (key0 + start) * v_row, v_row, length - start, BN, V, BV)
            top_M, total_M, acc = softmax_step(top_M, total_M, acc, score, value, scale2)
    seen_M = total_M > 0
    total_M = tl.where(seen_M, total_M, 1.0)
    at_out = out + head * o_head + row0 * o_row
    _store(at_out, o_row, length - at, acc / total_M[:, None], BM, V, BV)
    lse_M = tl.where(seen_M, top_M + tl.log2(total_M), float("inf"))
    tl.store(lse + head * SLOTS + tile0.to(tl.int64) * TILE + m, lse_M, mask=m < length)


@triton.jit
def delta(
    out, grad, result, table, o_row, o_head, g_row, g_head, SLOTS,
    V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """What the softmax's gradient subtracts: sum over the value dim of out * grad."""
    query0, _, length, at, tile0 = _block(table, tl.program_id(0))
    head = tl.program_id(1).to(tl.int64)
    row0 = query0 + at
    a = _rows(out + head * o_head + row0 * o_row, o_row, length - at, BM, V, BV).to(tl.float32)
    b = _rows(grad + head * g_head + row0 * g_row, g_row, length - at, BM, V, BV).to(tl.float32)
    slot_M = tile0.to(tl.int64) * TILE + at + tl.arange(0, BM)
    tl.store(result + head * SLOTS + slot_M, tl.sum(a * b, 1))


@triton.jit
def _key_step(dk, dv, key, value, query, grad, lse_M, delta_M, kept, scale2, HIDE: tl.constexpr):
    """Add what one block of queries says to the gradients of a block of keys and values."""
    score = tl.dot(key, tl.trans(query))
    dweight = tl.dot(value, tl.trans(grad))
    weight = tl.exp2(score * scale2 - lse_M[None, :])
    if HIDE:
        weight = tl.where(kept < 0, weight, 0.0)
    dv = tl.dot(weight.to(grad.dtype), grad, dv)
    dscore = weight * (dweight - delta_M[None, :])
    dk = tl.dot(dscore.to(query.dtype), query, dk)
    return dk, dv


@triton.jit
def backward_keys(
    q, k, v, grad, lse, delta, dk_out, dv_out, words, lists, counts, table,
    scale, scale2, q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head,
    dk_row, dk_head, dv_row, dv_head, SLOTS, W, LISTED,
    MASKED: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values of one head."""
    query0, key0, length, at, tile0 = _block(table, tl.program_id(0))
    head = tl.program_id(1).to(tl.int64)
    q += head * q_head
    grad += head * g_head
    lse += head * SLOTS + tile0.to(tl.int64) * TILE
    delta += head * SLOTS + tile0.to(tl.int64) * TILE
    n, m = at + tl.arange(0, BN), tl.arange(0, BM)
    row0 = key0 + at
    key = _rows(k + head * k_head + row0 * k_row, k_row, length - at, BN, D, BD)
    value = _rows(v + head * v_head + row0 * v_row, v_row, length - at, BN, V, BV)
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BV), tl.float32)
    if MASKED:
        words += row0 * W
        per: tl.constexpr = TILE // BM
        tile = tile0 + at // TILE
        names = lists + tile.to(tl.int64) * LISTED
        for i in range(0, tl.load(counts + tile) * per):
            start = (tl.load(names + i // per) - i // per) * TILE + i * BM
            query = _rows(q + (query0 + start) * q_row, q_row, length - start, BM, D, BD)
            above = _rows(grad + (query0 + start) * g_row, g_row, length - start, BM, V, BV)
            kept = _kept(words, W, length - at, start, BN, BM)
            lse_M = tl.load(lse + start + m)
            delta_M = tl.load(delta + start + m)
            dk, dv = _key_step(dk, dv, key, value, query, above, lse_M, delta_M, kept, scale2, True)
    else:
        for start in range(at, tl.minimum(at + BN, length), BM):
            query = _rows(q + (query0 + start) * q_row, q_row, length - start, BM, D, BD)
            above = _rows(grad + (query0 + start) * g_row, g_row, length - start, BM, V, BV)
            lse_M = tl.load(lse + start + m)
            delta_M = tl.load(delta + start + m)
            kept = tl.where(start + m[None, :] >= n[:, None], -1, 0)
            dk, dv = _key_step(dk, dv, key, value, query, above, lse_M, delta_M, kept, scale2, True)
        for start in range(at + BN, length, BM):
            query = _rows(q + (query0 + start) * q_row, q_row, length - start, BM, D, BD)
            above = _rows(grad + (query0 + start) * g_row, g_row, length - start, BM, V, BV)
            lse_M = tl.load(lse + start + m)
            delta_M = tl.load(delta + start + m)
            dk, dv = _key_step(
                dk, dv, key, value, query, above, lse_M, delta_M, None, scale2, False
            )
    rows = length - at
    _store(dk_out + head * dk_head + row0 * dk_row, dk_row, rows, dk * scale, BN, D, BD)
    _store(dv_out + head * dv_head + row0 * dv_row, dv_row, rows, dv, BN, V, BV)


@triton.jit
def _query_step(dq, query, above, key, value, lse_M, delta_M, kept, scale2, HIDE: tl.constexpr):
    """Add what one block of keys says to the gradient of a block of queries."""
    score = tl.dot(query, tl.trans(key))
    dweight = tl.dot(above, tl.trans(value))
    weight = tl.exp2(score * scale2 - lse_M[:, None])
    if HIDE:
        weight = tl.where(kept < 0, weight, 0.0)
    dscore = weight * (dweight - delta_M[:, None])
    return tl.dot(dscore.to(key.dtype), key, dq)


@triton.jit
def backward_queries(
    q, k, v, grad, lse, delta, dq_out, words, lists, counts, table,
    scale, scale2, q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head,
    dq_row, dq_head, SLOTS, W, LISTED,
    MASKED: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries of one head."""
    query0, key0, length, at, tile0 = _block(table, tl.program_id(0))
    head = tl.program_id(1).to(tl.int64)
    k += head * k_head
    v += head * v_head
    m = at + tl.arange(0, BM)
    n = tl.arange(0, BN)
    row0 = query0 + at
    query = _rows(q + head * q_head + row0 * q_row, q_row, length - at, BM, D, BD)
    above = _rows(grad + head * g_head + row0 * g_row, g_row, length - at, BM, V, BV)
    slot_M = head * SLOTS + tile0.to(tl.int64) * TILE + m
    lse_M = tl.load(lse + slot_M)
    delta_M = tl.load(delta + slot_M)
    dq = tl.zeros((BM, BD), tl.float32)
    if MASKED:
        words += row0 * W
        per: tl.constexpr = TILE // BN
        tile = tile0 + at // TILE
        names = lists + tile.to(tl.int64) * LISTED
        for i in range(0, tl.load(counts + tile) * per):
            start = (tl.load(names + i // per) - i // per) * TILE + i * BN
            kept = _kept(words, W, length - at, start, BM, BN)
            key = _rows(k + (key0 + start) * k_row, k_row, length - start, BN, D, BD)
            value = _rows(v + (key0 + start) * v_row, v_row, length - start, BN, V, BV)
            dq = _query_step(dq, query, above, key, value, lse_M, delta_M, kept, scale2, True)
    else:
        for start in range(0, at, BN):
            key = _rows(k + (key0 + start) * k_row, k_row, BN, BN, D, BD)
            value = _rows(v + (key0 + start) * v_row, v_row, BN, BN, V, BV)
            dq = _query_step(dq, query, above, key, value, lse_M, delta_M, None, scale2, False)
        for start in range(at, tl.minimum(at + BM, length), BN):
            key = _rows(k + (key0 + start) * k_row, k_row, length - start, BN, D, BD)
            value = _rows(v + (key0 + start) * v_row, v_row, length - start, BN, V, BV)
            kept = tl.where(m[:, None] >= start + n[None, :], -1, 0)
            dq = _query_step(dq, query, above, key, value, lse_M, delta_M, kept, scale2, True)
    _store(dq_out + head * dq_head + row0 * dq_row, dq_row, length - at, dq * scale, BM, D, BD)


@triton.jit
def _either(word_a, bits_a, word_b, bits_b):
    """Of two neighbouring runs, the last word and its bits so far."""
    return word_b, tl.where(word_a == word_b, bits_a | bits_b, bits_b)


@triton.jit
def keep(index, words, table, index_row, W, K, BK: tl.constexpr, BW: tl.constexpr):
    """One query's row of words, zero before, from the ascending keys it keeps.

    A row of -1 keeps every key up to the query. Indices in one word are neighbours, so a scan
    gathers its bits and the last of them writes it: every word has one writer.
    """
    query0, key0, length, at, _ = _block(table, tl.program_id(0))
    local = at + tl.program_id(1)
    if local < length:
        row = query0 + local
        words += row * W
        index += row * index_row
        if tl.load(index) < 0:
            for start in range(0, W, BW):
                w = start + tl.arange(0, BW)
                upto = (2 << (local & 31)) - 1
                bits = tl.where(w < local // 32, -1, tl.where(w == local // 32, upto, 0))
                tl.store(words + w, bits, mask=w < W)
        else:
            i = tl.arange(0, BK)
            key = tl.load(index + i, mask=i < K, other=-1)
            after = tl.load(index + i + 1, mask=i + 1 < K, other=-1)
            first = key0.to(tl.int32)
            word = tl.where(key < 0, W, (key - first) >> 5)
            bit = tl.where(key < 0, 0, 1 << ((key - first) & 31))
            word, bits = tl.associative_scan((word, bit), 0, _either)
            last = (key >= 0) & ((after < 0) | (((after - first) >> 5) != word))
            tl.store(words + word, bits, mask=last)


@triton.jit
def turn(words, turned, flags, table, W, LISTED, TURN: tl.constexpr):
    """Whether a tile of queries keeps anything of a tile of keys; and its bits the other way
    round, a row for each key."""
    query0, key0, length, at, tile0 = _block(table, tl.program_id(0))
    other = tl.program_id(1)
    if other * TILE <= at:
        n, w = tl.arange(0, TILE), other * (TILE // 32) + tl.arange(0, TILE // 32)
        inside = (at + n[:, None] < length) & (w[None, :] < W)
        word = tl.load(words + (query0 + at + n[:, None]) * W + w[None, :], mask=inside, other=0)
        if TURN:
            bit = (word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
            bit = tl.reshape(bit, (TILE // 32, 32, TILE)) << tl.arange(0, 32)[None, :, None]
            mine = at // 32 + tl.arange(0, TILE // 32)
            key = other * TILE + n
            to = turned + (key0 + key[None, :]) * W + mine[:, None]
            tl.store(to, tl.sum(bit, 1), mask=(key[None, :] < length) & (mine[:, None] < W))
        else:
            tile = (tile0 + at // TILE).to(tl.int64)
            tl.store(flags + tile * LISTED + other, tl.max(tl.max((word != 0).to(tl.int32), 1), 0))


@triton.jit
def name(flags, lists, counts, table, LISTED, BY_KEYS: tl.constexpr, BL: tl.constexpr):
    """The flagged tiles of one tile's row, ascending, and how many; BY_KEYS of its column."""
    _, _, length, at, tile0 = _block(table, tl.program_id(0))
    tile = (tile0 + at // TILE).to(tl.int64)
    i = tl.arange(0, BL)
    if BY_KEYS:
        to = flags + (tile0 + i).to(tl.int64) * LISTED + at // TILE
        flag = tl.load(to, mask=i * TILE < length, other=0)
    else:
        flag = tl.load(flags + tile * LISTED + i, mask=i < LISTED, other=0)
    place = tl.cumsum(flag, 0) - 1
    tl.store(lists + tile * LISTED + place, i, mask=flag != 0)
    tl.store(counts + tile, tl.sum(flag, 0))
