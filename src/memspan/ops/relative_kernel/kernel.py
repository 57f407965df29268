"""Triton programs of relative attention: the forward pass, and two for the backward pass.

Query ``i`` of ``T`` sees the keys ``first_i .. last_i`` of ``S``, and with ``d = S - T + i - j``::

    A_ij = scale (q_i . k_j + P[i, d + F])        weight_ij = 2^(A_ij log2(e) - total_i)

``P [T, S + F]`` is the position term by distance, ``F`` of them in the future. Its tile for the queries
and keys of a program is read where it lies, at ``i * stride + d + F``: row ``i`` of a tile begins one
further than row ``i - 1``. Each ``P[i, d + F]`` belongs to one key, so its gradient is stored and never
added to: nothing depends on the order in which programs run.

``q``, ``k``, ``v`` and ``d_out`` come with strides of the batch, the heads and the rows, which are
contiguous. All others are contiguous, heads before rows of the batch: ``P [H, B, T, S + F]``, and what
is written. Widths are padded to powers of two in registers.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(pointer, rows, n_rows, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """``[rows, COLUMNS]`` with zeros beyond the last row and beyond ``WIDTH``."""
    column = tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (column < WIDTH)[None]
    at = pointer + rows.to(tl.int64)[:, None] * stride + column[None]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _store(pointer, tile, rows, n_rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a ``tile [rows, COLUMNS]`` as rows of ``WIDTH``, in the type of the ``pointer``."""
    column = tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (column < WIDTH)[None]
    at = pointer + rows.to(tl.int64)[:, None] * WIDTH + column[None]
    tl.store(at, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _scores(rows, columns, by_distance, at, seen, scale_log2, PRECISION: tl.constexpr):
    """``A log2(e)`` of a tile, ``-inf`` where a query does not see the key."""
    position = tl.load(by_distance + at, mask=seen, other=0.0).to(tl.float32)
    scores = (tl.dot(rows, tl.trans(columns), input_precision=PRECISION) + position) * scale_log2
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _see(first, last, keys, n_keys):
    """True where a query sees the key; queries are one side of the tile and keys the other."""
    return (keys >= first) & (keys <= last) & (keys < n_keys)


@triton.jit
def _skew(queries, keys, n_queries, n_distances):
    """Places of ``P[i, F + S - T + i - j]``, ``F + S`` distances, for a tile of queries and keys."""
    return queries.to(tl.int64) * n_distances + (n_distances - n_queries + queries - keys)


@triton.jit
def forward(
    q, k, v, by_distance, first, last, out, totals,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    limits_batch,
    n_rows, n_queries, n_keys, n_distances, scale_log2,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend for ``QUERIES`` queries of one head of one row, by an online softmax over their keys.

    Writes ``out [H, B, T, V]`` and ``totals [H, B, T]``, the logarithm to base 2 of the softmax's sum.
    """
    parts = tl.cdiv(n_queries, QUERIES)
    pair = (tl.program_id(0) // parts).to(tl.int64)
    head = pair // n_rows
    row = pair % n_rows
    queries = tl.program_id(0) % parts * QUERIES + tl.arange(0, QUERIES)
    exists = queries < n_queries
    first_seen = tl.load(first + row * limits_batch + queries, mask=exists, other=n_keys)
    last_seen = tl.load(last + row * limits_batch + queries, mask=exists, other=-1)
    q_tile = _tile(q + row * q_batch + head * q_head, queries, n_queries, q_row, WIDTH, COLUMNS)
    k += row * k_batch + head * k_head
    v += row * v_batch + head * v_head
    by_distance += pair * n_queries * n_distances

    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES, VALUE_COLUMNS], tl.float32)
    begin = tl.min(first_seen) // KEYS * KEYS
    end = tl.max(last_seen) + 1
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        seen = _see(first_seen[:, None], last_seen[:, None], keys[None], n_keys)
        k_tile = _tile(k, keys, n_keys, k_row, WIDTH, COLUMNS)
        at = _skew(queries[:, None], keys[None], n_queries, n_distances)
        scores = _scores(q_tile, k_tile, by_distance, at, seen, scale_log2, PRECISION)
        now = tl.maximum(largest, tl.max(scores, 1))
        # A query that has seen no key yet: minus infinity has no difference from itself.
        anchor = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(largest - anchor)
        v_tile = _tile(v, keys, n_keys, v_row, VALUE_WIDTH, VALUE_COLUMNS)
        mean = mean * shrink[:, None]
        mean += tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        largest = now

    some = total > 0
    total = tl.where(some, total, 1.0)
    sums = tl.where(some, largest, 0.0) + tl.log2(total)
    tl.store(totals + pair * n_queries + queries, sums, mask=exists)
    out += pair * n_queries * VALUE_WIDTH
    _store(out, mean / total[:, None], queries, n_queries, VALUE_WIDTH, VALUE_COLUMNS)


@triton.jit
def backward_queries(
    q, k, v, by_distance, first, last, out, totals, d_out, d_q, d_by_distance, inner,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    limits_batch, g_batch, g_head, g_row,
    n_rows, n_queries, n_keys, n_distances, scale, scale_log2,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients for ``QUERIES`` queries of one head of one row.

    Writes ``d_q [H, B, T, K]``, content's part alone; ``d_P`` for the keys that a query sees; and
    ``inner [H, B, T]``, the product of ``out`` and ``d_out``, for :func:`backward_keys`.
    """
    parts = tl.cdiv(n_queries, QUERIES)
    pair = (tl.program_id(0) // parts).to(tl.int64)
    head = pair // n_rows
    row = pair % n_rows
    queries = tl.program_id(0) % parts * QUERIES + tl.arange(0, QUERIES)
    exists = queries < n_queries
    first_seen = tl.load(first + row * limits_batch + queries, mask=exists, other=n_keys)
    last_seen = tl.load(last + row * limits_batch + queries, mask=exists, other=-1)
    q_tile = _tile(q + row * q_batch + head * q_head, queries, n_queries, q_row, WIDTH, COLUMNS)
    k += row * k_batch + head * k_head
    v += row * v_batch + head * v_head
    by_distance += pair * n_queries * n_distances
    d_by_distance += pair * n_queries * n_distances
    d_out += row * g_batch + head * g_head
    out += pair * n_queries * VALUE_WIDTH

    g_tile = _tile(d_out, queries, n_queries, g_row, VALUE_WIDTH, VALUE_COLUMNS)
    out_tile = _tile(out, queries, n_queries, VALUE_WIDTH, VALUE_WIDTH, VALUE_COLUMNS)
    product = tl.sum(g_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(inner + pair * n_queries + queries, product, mask=exists)
    sums = tl.load(totals + pair * n_queries + queries, mask=exists, other=0.0)

    found = tl.zeros([QUERIES, COLUMNS], tl.float32)
    begin = tl.min(first_seen) // KEYS * KEYS
    end = tl.max(last_seen) + 1
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        seen = _see(first_seen[:, None], last_seen[:, None], keys[None], n_keys)
        k_tile = _tile(k, keys, n_keys, k_row, WIDTH, COLUMNS)
        v_tile = _tile(v, keys, n_keys, v_row, VALUE_WIDTH, VALUE_COLUMNS)
        at = _skew(queries[:, None], keys[None], n_queries, n_distances)
        scores = _scores(q_tile, k_tile, by_distance, at, seen, scale_log2, PRECISION)
        weights = tl.exp2(scores - sums[:, None])
        d_weights = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        d_scores = (weights * (d_weights - product[:, None]) * scale).to(k_tile.dtype)
        at = _skew(queries[:, None], keys[None], n_queries, n_distances)
        tl.store(d_by_distance + at, d_scores, mask=seen)
        found += tl.dot(d_scores, k_tile, input_precision=PRECISION)
    d_q += pair * n_queries * WIDTH
    _store(d_q, found, queries, n_queries, WIDTH, COLUMNS)


@triton.jit
def backward_keys(
    q, k, v, by_distance, first, last, begin_query, end_query, totals, inner, d_out, d_k, d_v,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    limits_batch, keys_batch, g_batch, g_head, g_row,
    n_rows, n_queries, n_keys, n_distances, scale, scale_log2,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients for ``KEYS`` keys of one head of one row.

    Writes ``d_k [H, B, S, K]`` and ``d_v [H, B, S, V]``. Queries before ``begin_query [B or 1, S]`` of
    the first key, and from ``end_query`` of the last key on, see none of the keys.
    """
    parts = tl.cdiv(n_keys, KEYS)
    pair = (tl.program_id(0) // parts).to(tl.int64)
    head = pair // n_rows
    row = pair % n_rows
    start = tl.program_id(0) % parts * KEYS
    keys = start + tl.arange(0, KEYS)
    q += row * q_batch + head * q_head
    by_distance += pair * n_queries * n_distances
    d_out += row * g_batch + head * g_head
    totals += pair * n_queries
    inner += pair * n_queries
    k_tile = _tile(k + row * k_batch + head * k_head, keys, n_keys, k_row, WIDTH, COLUMNS)
    v_tile = _tile(
        v + row * v_batch + head * v_head, keys, n_keys, v_row, VALUE_WIDTH, VALUE_COLUMNS
    )

    found_k = tl.zeros([KEYS, COLUMNS], tl.float32)
    found_v = tl.zeros([KEYS, VALUE_COLUMNS], tl.float32)
    final_key = tl.minimum(start + KEYS, n_keys) - 1
    begin = tl.load(begin_query + row * keys_batch + start) // QUERIES * QUERIES
    end = tl.load(end_query + row * keys_batch + final_key)
    for start_query in range(begin, end, QUERIES):
        queries = start_query + tl.arange(0, QUERIES)
        exists = queries < n_queries
        first_seen = tl.load(first + row * limits_batch + queries, mask=exists, other=n_keys)
        last_seen = tl.load(last + row * limits_batch + queries, mask=exists, other=-1)
        seen = _see(first_seen[None], last_seen[None], keys[:, None], n_keys)
        q_tile = _tile(q, queries, n_queries, q_row, WIDTH, COLUMNS)
        g_tile = _tile(d_out, queries, n_queries, g_row, VALUE_WIDTH, VALUE_COLUMNS)
        sums = tl.load(totals + queries, mask=exists, other=0.0)
        product = tl.load(inner + queries, mask=exists, other=0.0)
        at = _skew(queries[None], keys[:, None], n_queries, n_distances)
        scores = _scores(k_tile, q_tile, by_distance, at, seen, scale_log2, PRECISION)
        weights = tl.exp2(scores - sums[None])
        found_v += tl.dot(weights.to(g_tile.dtype), g_tile, input_precision=PRECISION)
        d_weights = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
        d_scores = (weights * (d_weights - product[None]) * scale).to(q_tile.dtype)
        found_k += tl.dot(d_scores, q_tile, input_precision=PRECISION)
    _store(d_k + pair * n_keys * WIDTH, found_k, keys, n_keys, WIDTH, COLUMNS)
    _store(d_v + pair * n_keys * VALUE_WIDTH, found_v, keys, n_keys, VALUE_WIDTH, VALUE_COLUMNS)
