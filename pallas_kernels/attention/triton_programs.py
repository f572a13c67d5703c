# pyright: basic, reportMissingImports=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton compiles the text of these functions: their parameters are pointers and constants whose
# types exist while it does so only, and the types of triton's own names are those outside of it.
"""The three programs of FlashAttention-2 (Dao, 2023, arXiv:2307.08691, section 3), in Triton.

`kernel_triton` calls them; this module needs triton, which not everybody has.

Scores are kept in units of log2, so that exponentials are exp2. A program owns a block of
rows (queries, or keys in `key_gradients`) and walks over the blocks of the other side that
the band can let it see, in three stretches:

    |  masked  |        full         |  masked  |      a block is full where every query of it
    low     full_low            full_high     high     sees every key; only those of the outer
                                                       stretches ask which ones do

All axes are ragged: memory past the lengths is neither read nor written.

Constants go from function to function in tuples:

    HEAD    (elements from row to row, HEAD_DIM, WIDTH): where a head's rows are
    MASK    (Q_LEN, KV_LEN, LEFT, RIGHT, OFFSET, SEGMENTS): which keys a query sees
    SCORES  (SCALE, SOFT_CAP): what scores are made of
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load(
    base,
    first,
    length,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """[ROWS, WIDTH] of a head from row `first` on: zeros past the length and past HEAD_DIM."""
    STRIDE: tl.constexpr = HEAD[0]
    HEAD_DIM: tl.constexpr = HEAD[1]
    WIDTH: tl.constexpr = HEAD[2]
    rows = first + tl.arange(0, ROWS)
    lanes = tl.arange(0, WIDTH)
    pointers = base + rows[:, None].to(tl.int64) * STRIDE + lanes[None, :]
    if RAGGED and HEAD_DIM != WIDTH:
        seen = (rows < length)[:, None] & (lanes < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=seen, other=0.0)
    elif RAGGED:
        return tl.load(pointers, mask=(rows < length)[:, None], other=0.0)
    elif HEAD_DIM != WIDTH:
        return tl.load(pointers, mask=(lanes < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _load_pair(
    one,
    other,
    first,
    length,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """The same rows of keys and values, or of queries and the gradient of their output."""
    a = _load(one, first, length, HEAD, ROWS, RAGGED)
    b = _load(other, first, length, HEAD, ROWS, RAGGED)
    return a, b


@triton.jit
def _load_sums(lse, delta, rows, length):
    """What the backward pass has of each query in one number."""
    seen = rows < length
    return tl.load(lse + rows, mask=seen, other=0.0), tl.load(delta + rows, mask=seen, other=0.0)


@triton.jit
def _store(
    base,
    first,
    length,
    values,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`values` [ROWS, WIDTH] to the same."""
    STRIDE: tl.constexpr = HEAD[0]
    HEAD_DIM: tl.constexpr = HEAD[1]
    WIDTH: tl.constexpr = HEAD[2]
    rows = first + tl.arange(0, ROWS)
    lanes = tl.arange(0, WIDTH)
    pointers = base + rows[:, None].to(tl.int64) * STRIDE + lanes[None, :]
    inside = (rows < length)[:, None] & (lanes < HEAD_DIM)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _dot(a, b):
    # float32 keeps its 24 bits: who wants TF32's 11 has bfloat16, which is faster.
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _bend(raw, SCORES: tl.constexpr):
    """Scores in units of log2, and the tanh that they went through if there is a cap."""
    SCALE: tl.constexpr = SCORES[0]
    SOFT_CAP: tl.constexpr = SCORES[1]
    if SOFT_CAP > 0:
        # Where exp2 overflows this is 1, where it underflows -1, as it should.
        bent = 1 - 2 / (tl.exp2(raw * (2 * SCALE / SOFT_CAP * LOG2_E)) + 1)
        return bent * (SOFT_CAP * LOG2_E), bent
    else:
        return raw * (SCALE * LOG2_E), raw


@triton.jit
def _seen(
    q_rows,
    kv_rows,
    q_ids,
    kv_ids,
    MASK: tl.constexpr,
):
    """Which of the keys the queries see; the two broadcast against each other."""
    Q_LEN: tl.constexpr = MASK[0]
    KV_LEN: tl.constexpr = MASK[1]
    LEFT: tl.constexpr = MASK[2]
    RIGHT: tl.constexpr = MASK[3]
    OFFSET: tl.constexpr = MASK[4]
    SEGMENTS: tl.constexpr = MASK[5]
    seen = (q_rows < Q_LEN) & (kv_rows < KV_LEN)
    if LEFT >= 0:
        seen &= kv_rows >= q_rows + (OFFSET - LEFT)
    if RIGHT >= 0:
        seen &= kv_rows <= q_rows + (OFFSET + RIGHT)
    if SEGMENTS:
        q_segments = tl.load(q_ids + q_rows, mask=q_rows < Q_LEN, other=0)
        kv_segments = tl.load(kv_ids + kv_rows, mask=kv_rows < KV_LEN, other=0)
        seen &= q_segments == kv_segments
    return seen


@triton.jit
def _stretches(
    first,
    last,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    OFFSET: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Where the stretches begin and end for the rows `first` to `last`, in rows of the other side.

    Row r sees rows r + OFFSET - BEFORE to r + OFFSET + AFTER of the `LENGTH` ones of the other
    side; a limit of -1 is none.
    """
    low = first * 0
    high = low + LENGTH
    full_low = low
    full_high = low + LENGTH // BLOCK * BLOCK
    if BEFORE >= 0:
        low = tl.maximum(first + (OFFSET - BEFORE), 0) // BLOCK * BLOCK
        full_low = tl.cdiv(tl.maximum(last + (OFFSET - BEFORE), 0), BLOCK) * BLOCK
    if AFTER >= 0:
        high = tl.minimum(last + (OFFSET + AFTER + 1), LENGTH)
        full_high = tl.minimum(
            tl.maximum(first + (OFFSET + AFTER + 1), 0) // BLOCK * BLOCK, full_high
        )
    high = tl.maximum(high, low)
    if SEGMENTS:
        # Which blocks are of one segment only the ids could tell: all are asked.
        full_low = low
        full_high = low
    full_low = tl.minimum(full_low, high)
    full_high = tl.maximum(full_low, full_high)
    return low, full_low, full_high, high


@triton.jit
def _stretch(NUMBER: tl.constexpr, low, full_low, full_high, high):
    """Where one of the three begins and ends."""
    if NUMBER == 0:
        return low, full_low
    elif NUMBER == 1:
        return full_low, full_high
    else:
        return full_high, high


@triton.jit
def _attend(
    total,
    norm,
    largest,
    q,
    k_base,
    v_base,
    q_ids,
    kv_ids,
    first,
    low,
    high,
    length,
    MASKED: tl.constexpr,
    MASK: tl.constexpr,
    SCORES: tl.constexpr,
    KV_HEAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """The running softmax over one stretch of keys."""
    q_rows = first + tl.arange(0, BLOCK_Q)[:, None]
    for start in tl.range(low, high, BLOCK_KV):
        k = _load(k_base, start, length, KV_HEAD, BLOCK_KV, MASKED)
        scores, _ = _bend(_dot(q, k.T), SCORES)
        if MASKED:
            kv_rows = start + tl.arange(0, BLOCK_KV)[None, :]
            seen = _seen(q_rows, kv_rows, q_ids, kv_ids, MASK)
            scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen nothing so far: -inf - -inf would not be a number.
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest) if MASKED else new_largest
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(largest - finite)
        norm = norm * shrink + tl.sum(weights, 1)
        v = _load(v_base, start, length, KV_HEAD, BLOCK_KV, MASKED)
        total = total * shrink[:, None] + _dot(weights.to(v.dtype), v)
        largest = new_largest
    return total, norm, largest


@triton.jit
def forward(
    q,
    k,
    v,
    q_ids,
    kv_ids,
    out,
    lse,
    Q_LEN: tl.constexpr,
    KV_LEN: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Algorithm 1. Grid: blocks of queries, query heads, sequences."""
    # The last queries see the most keys where a band is causal: they start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    kv_head = head // (Q_HEADS // KV_HEADS)
    Q_HEAD: tl.constexpr = (Q_HEADS * HEAD_DIM, HEAD_DIM, WIDTH)
    KV_HEAD: tl.constexpr = (KV_HEADS * HEAD_DIM, HEAD_DIM, WIDTH)
    MASK: tl.constexpr = (Q_LEN, KV_LEN, LEFT, RIGHT, OFFSET, SEGMENTS)
    SCORES: tl.constexpr = (SCALE, SOFT_CAP)
    q_start = sequence * (Q_LEN * Q_HEADS * HEAD_DIM) + head * HEAD_DIM
    kv_start = sequence * (KV_LEN * KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    q_ids += sequence * Q_LEN
    kv_ids += sequence * KV_LEN

    q_block = _load(q + q_start, first, Q_LEN, Q_HEAD, BLOCK_Q, True)
    total = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    norm = tl.zeros([BLOCK_Q], tl.float32)
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    last = tl.minimum(first + BLOCK_Q, Q_LEN) - 1
    low, full_low, full_high, high = _stretches(
        first, last, LEFT, RIGHT, OFFSET, KV_LEN, BLOCK_KV, SEGMENTS
    )
    for stretch in tl.static_range(3):
        start, stop = _stretch(stretch, low, full_low, full_high, high)
        total, norm, largest = _attend(
            total,
            norm,
            largest,
            q_block,
            k + kv_start,
            v + kv_start,
            q_ids,
            kv_ids,
            first,
            start,
            stop,
            KV_LEN,
            stretch != 1,
            MASK,
            SCORES,
            KV_HEAD,
            BLOCK_Q,
            BLOCK_KV,
        )

    some = norm > 0
    safe = tl.where(some, norm, 1.0)
    _store(out + q_start, first, Q_LEN, total / safe[:, None], Q_HEAD, BLOCK_Q)
    rows = first + tl.arange(0, BLOCK_Q)
    natural = tl.where(some, (largest + tl.log2(safe)) * LN_2, float("-inf"))
    tl.store(lse + (sequence * Q_HEADS + head) * Q_LEN + rows, natural, mask=rows < Q_LEN)


@triton.jit
def _weights(
    raw,
    d_weights,
    lse,
    delta,
    q_rows,
    kv_rows,
    q_ids,
    kv_ids,
    MASKED: tl.constexpr,
    MASK: tl.constexpr,
    SCORES: tl.constexpr,
):
    """The weights of raw scores, and the gradient of the raw scores but for the factor SCALE.

    Queries may be the rows or the columns of a block: what is given of them, and of the keys,
    broadcasts against the scores.
    """
    SOFT_CAP: tl.constexpr = SCORES[1]
    scores, bent = _bend(raw, SCORES)
    weights = tl.exp2(scores - lse * LOG2_E)
    if MASKED:
        seen = _seen(q_rows, kv_rows, q_ids, kv_ids, MASK)
        weights = tl.where(seen, weights, 0.0)
    d_raw = weights * (d_weights - delta)
    if SOFT_CAP > 0:
        d_raw *= 1 - bent * bent
    return weights, d_raw


@triton.jit
def _add_query_gradients(
    d_q,
    q,
    d_out,
    lse,
    delta,
    k_base,
    v_base,
    q_ids,
    kv_ids,
    first,
    low,
    high,
    length,
    MASKED: tl.constexpr,
    MASK: tl.constexpr,
    SCORES: tl.constexpr,
    KV_HEAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Over one stretch of keys."""
    q_rows = first + tl.arange(0, BLOCK_Q)[:, None]
    for start in tl.range(low, high, BLOCK_KV):
        k, v = _load_pair(k_base, v_base, start, length, KV_HEAD, BLOCK_KV, MASKED)
        _, d_raw = _weights(
            _dot(q, k.T),
            _dot(d_out, v.T),
            lse[:, None],
            delta[:, None],
            q_rows,
            start + tl.arange(0, BLOCK_KV)[None, :],
            q_ids,
            kv_ids,
            MASKED,
            MASK,
            SCORES,
        )
        d_q += _dot(d_raw.to(k.dtype), k)
    return d_q


@triton.jit
def query_gradients(
    q,
    k,
    v,
    d_out,
    lse,
    delta,
    q_ids,
    kv_ids,
    d_q,
    Q_LEN: tl.constexpr,
    KV_LEN: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Of algorithm 2 what belongs to the queries. Grid: as of `forward`."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    kv_head = head // (Q_HEADS // KV_HEADS)
    Q_HEAD: tl.constexpr = (Q_HEADS * HEAD_DIM, HEAD_DIM, WIDTH)
    KV_HEAD: tl.constexpr = (KV_HEADS * HEAD_DIM, HEAD_DIM, WIDTH)
    MASK: tl.constexpr = (Q_LEN, KV_LEN, LEFT, RIGHT, OFFSET, SEGMENTS)
    SCORES: tl.constexpr = (SCALE, SOFT_CAP)
    q_start = sequence * (Q_LEN * Q_HEADS * HEAD_DIM) + head * HEAD_DIM
    kv_start = sequence * (KV_LEN * KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    q_ids += sequence * Q_LEN
    kv_ids += sequence * KV_LEN
    rows = first + tl.arange(0, BLOCK_Q)
    row_start = (sequence * Q_HEADS + head) * Q_LEN

    q_block, d_out_block = _load_pair(
        q + q_start, d_out + q_start, first, Q_LEN, Q_HEAD, BLOCK_Q, True
    )
    lse_rows, delta_rows = _load_sums(lse + row_start, delta + row_start, rows, Q_LEN)
    total = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    last = tl.minimum(first + BLOCK_Q, Q_LEN) - 1
    low, full_low, full_high, high = _stretches(
        first, last, LEFT, RIGHT, OFFSET, KV_LEN, BLOCK_KV, SEGMENTS
    )
    for stretch in tl.static_range(3):
        start, stop = _stretch(stretch, low, full_low, full_high, high)
        total = _add_query_gradients(
            total,
            q_block,
            d_out_block,
            lse_rows,
            delta_rows,
            k + kv_start,
            v + kv_start,
            q_ids,
            kv_ids,
            first,
            start,
            stop,
            KV_LEN,
            stretch != 1,
            MASK,
            SCORES,
            KV_HEAD,
            BLOCK_Q,
            BLOCK_KV,
        )
    _store(d_q + q_start, first, Q_LEN, total * SCALE, Q_HEAD, BLOCK_Q)


@triton.jit
def _add_key_gradients(
    d_k,
    d_v,
    k,
    v,
    q_base,
    d_out_base,
    lse,
    delta,
    q_ids,
    kv_ids,
    first,
    low,
    high,
    length,
    MASKED: tl.constexpr,
    MASK: tl.constexpr,
    SCORES: tl.constexpr,
    Q_HEAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Over one stretch of queries; scores are transposed, [keys, queries]."""
    kv_rows = first + tl.arange(0, BLOCK_KV)[:, None]
    for start in tl.range(low, high, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        q, d_out = _load_pair(q_base, d_out_base, start, length, Q_HEAD, BLOCK_Q, MASKED)
        lse_rows, delta_rows = _load_sums(lse, delta, rows, length)
        weights, d_raw = _weights(
            _dot(k, q.T),
            _dot(v, d_out.T),
            lse_rows[None, :],
            delta_rows[None, :],
            rows[None, :],
            kv_rows,
            q_ids,
            kv_ids,
            MASKED,
            MASK,
            SCORES,
        )
        d_v += _dot(weights.to(d_out.dtype), d_out)
        d_k += _dot(d_raw.to(q.dtype), q)
    return d_k, d_v


@triton.jit
def key_gradients(
    q,
    k,
    v,
    d_out,
    lse,
    delta,
    q_ids,
    kv_ids,
    d_k,
    d_v,
    Q_LEN: tl.constexpr,
    KV_LEN: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Of algorithm 2 what belongs to keys and values: the sums over the query heads that share
    them stay in one program. Grid: blocks of keys, key/value heads, sequences."""
    # The first keys are seen by the most queries where a band is causal: they start first.
    first = tl.program_id(0) * BLOCK_KV
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    Q_HEAD: tl.constexpr = (Q_HEADS * HEAD_DIM, HEAD_DIM, WIDTH)
    KV_HEAD: tl.constexpr = (KV_HEADS * HEAD_DIM, HEAD_DIM, WIDTH)
    MASK: tl.constexpr = (Q_LEN, KV_LEN, LEFT, RIGHT, OFFSET, SEGMENTS)
    SCORES: tl.constexpr = (SCALE, SOFT_CAP)
    kv_start = sequence * (KV_LEN * KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    q_ids += sequence * Q_LEN
    kv_ids += sequence * KV_LEN

    k_block, v_block = _load_pair(
        k + kv_start, v + kv_start, first, KV_LEN, KV_HEAD, BLOCK_KV, True
    )
    k_total = tl.zeros([BLOCK_KV, WIDTH], tl.float32)
    v_total = tl.zeros([BLOCK_KV, WIDTH], tl.float32)
    last = tl.minimum(first + BLOCK_KV, KV_LEN) - 1
    # Key j is seen by the queries j - OFFSET - RIGHT to j - OFFSET + LEFT.
    low, full_low, full_high, high = _stretches(
        first, last, RIGHT, LEFT, -OFFSET, Q_LEN, BLOCK_Q, SEGMENTS
    )
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q_start = sequence * (Q_LEN * Q_HEADS * HEAD_DIM) + head * HEAD_DIM
        row_start = (sequence * Q_HEADS + head) * Q_LEN
        for stretch in tl.static_range(3):
            start, stop = _stretch(stretch, low, full_low, full_high, high)
            k_total, v_total = _add_key_gradients(
                k_total,
                v_total,
                k_block,
                v_block,
                q + q_start,
                d_out + q_start,
                lse + row_start,
                delta + row_start,
                q_ids,
                kv_ids,
                first,
                start,
                stop,
                Q_LEN,
                stretch != 1,
                MASK,
                SCORES,
                Q_HEAD,
                BLOCK_Q,
                BLOCK_KV,
            )
    _store(d_k + kv_start, first, KV_LEN, k_total * SCALE, KV_HEAD, BLOCK_KV)
    _store(d_v + kv_start, first, KV_LEN, v_total, KV_HEAD, BLOCK_KV)
