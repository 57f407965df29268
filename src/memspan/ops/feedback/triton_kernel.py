"""Triton programs of the Feedback Transformer's recurrence: one per row, for all tokens and layers, and
one per part of a head's position tables, for their gradients.

Rows do not depend on each other, so no program waits for another. Within a program a vector that all
its threads need goes through a buffer, with a barrier on either side. Every weight is read once per
token, a matrix in tiles of ``INPUTS`` by ``OUTPUTS``, and sums are float32. Names and order are those
of ``steps.py``; buffers are described in ``buffers.py``, and all are contiguous.

Backward, attention weights are computed again from the logarithms of their sums, ``totals``,
``[T, L, H * B]``.
"""

import triton
import triton.language as tl

STAGES = tl.constexpr(3)
"""Tiles of a matrix that are on their way at once."""


@triton.jit
def _vector(pointer, n, COLUMNS: tl.constexpr):
    """``n`` numbers in float32, and zeros up to ``COLUMNS``."""
    column = tl.arange(0, COLUMNS)
    return tl.load(pointer + column, mask=column < n, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, value, n, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    tl.store(pointer + column, value.to(pointer.dtype.element_ty), mask=column < n)


@triton.jit
def _moments(pointer, n, eps, NORM: tl.constexpr, COLUMNS: tl.constexpr):
    """Mean and reciprocal deviation; 0 and 1 where there is no norm."""
    mean = 0.0
    rstd = 1.0
    if NORM:
        x = _vector(pointer, n, COLUMNS)
        mean = tl.sum(x, 0) / n
        centred = tl.where(tl.arange(0, COLUMNS) < n, x - mean, 0.0)
        rstd = 1 / tl.sqrt(tl.sum(centred * centred, 0) / n + eps)
    return mean, rstd


@triton.jit
def _through_norm(g, pointer, n, eps, COLUMNS: tl.constexpr):
    """Gradient of what a norm was given, from that of its result ``g``."""
    mean, rstd = _moments(pointer, n, eps, True, COLUMNS)
    inside = tl.arange(0, COLUMNS) < n
    normalised = tl.where(inside, (_vector(pointer, n, COLUMNS) - mean) * rstd, 0.0)
    shared = tl.sum(g, 0) / n + normalised * (tl.sum(g * normalised, 0) / n)
    return tl.where(inside, (g - shared) * rstd, 0.0)


@triton.jit
def _product(
    x, mean, rstd, weight, outputs, N_INPUTS: tl.constexpr, N_OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """The ``outputs`` of a product of the normalised ``x`` and ``weight [N_INPUTS, N_OUTPUTS]``."""
    total = tl.zeros([INPUTS, OUTPUTS], tl.float32)
    # Nothing is stored in here, so the next tiles may be loaded ahead.
    for start in tl.range(0, N_INPUTS, INPUTS, num_stages=STAGES):
        rows = start + tl.arange(0, INPUTS)
        inside = rows < N_INPUTS
        x_tile = (tl.load(x + rows, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        at = weight + rows.to(tl.int64)[:, None] * N_OUTPUTS + outputs[None]
        w_tile = tl.load(at, mask=inside[:, None] & (outputs < N_OUTPUTS)[None], other=0.0)
        total += x_tile[:, None] * w_tile.to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _factor(kept, at, mask, scale, DROPS: tl.constexpr):
    """Factors of dropout; 1 where nothing is dropped."""
    factor = 1.0
    if DROPS:
        factor = tl.load(kept + at, mask=mask, other=0).to(tl.float32) * scale
    return factor


@triton.jit
def _see(visible, t, row, batch, n_keys, SEES_PART: tl.constexpr):
    """The newest slots that a row sees."""
    sees = n_keys
    if SEES_PART:
        sees = tl.minimum(tl.load(visible + t * batch + row), n_keys).to(tl.int32)
    return sees


@triton.jit
def _tile(pointer, slots, inside, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Keys or values of ``slots``, ``[KEYS, COLUMNS]``."""
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < WIDTH)[None]
    return tl.load(pointer + slots[:, None] * WIDTH + column[None], mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def _distances(pointer, slots, inside, span, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """``R`` of ``slots``, from a table ``[K, S]``: ``[KEYS, COLUMNS]``."""
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < WIDTH)[None]
    return tl.load(pointer + column[None] * span + slots[:, None], mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def _seen_before(t, n_old, span):
    """The sum of the slots in reach over all steps before ``t``."""
    growing = tl.maximum(tl.minimum(t, span - n_old), 0).to(tl.int64)
    return growing * n_old + growing * (growing - 1) // 2 + (t - growing) * span


@triton.jit
def _slot(n, row, batch, n_slots, slot, N_HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Places in ``kv [2, G, H * B, N, K]`` of the ``n`` th keys and values of one slot of a row."""
    return ((n // WIDTH * batch + row) * n_slots + slot) * WIDTH + n % WIDTH


@triton.jit
def forward(
    streams, sums, queries, attended, activated, before, vectors, kv, totals,
    query, query_bias, position_keys, position_scores, output, inner, inner_bias, outer,
    memory, memory_bias, mix, gains, biases, visible,
    kept_weights, kept_attention, kept_activated, kept_feed_forward,
    n_steps, batch, n_old, span, n_kept, eps, weights_scale, scale,
    D_MODEL: tl.constexpr, D_FF: tl.constexpr, N_LAYERS: tl.constexpr, N_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, POST: tl.constexpr, GELU: tl.constexpr,
    NORMS_MEMORY: tl.constexpr, SEES_PART: tl.constexpr, DROPS_WEIGHTS: tl.constexpr,
    DROPS: tl.constexpr, STATE: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Read all tokens of a row."""
    row = tl.program_id(0).to(tl.int64)
    HEADS: tl.constexpr = N_HEADS * WIDTH
    KV: tl.constexpr = 2 * GROUPS * HEADS
    rows = N_HEADS * batch
    n_slots = n_old + n_steps
    for t in range(n_steps):
        n_keys = tl.minimum(span, n_old + t)
        low = n_old + t - n_keys
        sees = _see(visible, t, row, batch, n_keys, SEES_PART)
        for layer in range(N_LAYERS):
            of_token = (layer * n_steps + t) * batch + row
            x = streams + ((2 * layer * n_steps + t) * batch + row) * D_MODEL
            between = streams + (((2 * layer + 1) * n_steps + t) * batch + row) * D_MODEL
            after = streams + (((2 * layer + 2) * n_steps + t) * batch + row) * D_MODEL
            sum_1 = between
            sum_2 = after
            if POST:
                sum_1 = sums + ((2 * layer * n_steps + t) * batch + row) * D_MODEL
                sum_2 = sums + (((2 * layer + 1) * n_steps + t) * batch + row) * D_MODEL

            # Queries.
            of_queries = queries + ((t * N_LAYERS + layer) * rows + row) * WIDTH
            mean, rstd = _moments(x, D_MODEL, eps, not POST, STATE)
            for start in range(0, HEADS, OUTPUTS):
                n = start + tl.arange(0, OUTPUTS)
                weight = query + layer * D_MODEL * HEADS
                y = _product(x, mean, rstd, weight, n, D_MODEL, HEADS, INPUTS, OUTPUTS)
                y += tl.load(query_bias + layer * HEADS + n, mask=n < HEADS, other=0.0)
                at = of_queries + (n // WIDTH) * batch * WIDTH + n % WIDTH
                tl.store(at, y.to(queries.dtype.element_ty), mask=n < HEADS)
            tl.debug_barrier()

            # Attention, by an online softmax over the slots.
            group = layer % GROUPS
            for head in range(N_HEADS):
                q = _vector(of_queries + head * batch * WIDTH, WIDTH, COLUMNS)
                own = head * batch + row
                keys = kv + ((group * rows + own) * n_slots + low) * WIDTH
                values = keys + GROUPS * rows * n_slots * WIDTH
                # Farthest first.
                table = (layer * N_HEADS + head) * span
                of_distance = position_keys + table * WIDTH + span - n_keys
                of_scores = position_scores + table + span - n_keys
                largest = tl.full([1], float("-inf"), tl.float32)
                total = tl.zeros([1], tl.float32)
                read = tl.zeros([COLUMNS], tl.float32)
                for start in range(0, n_keys, KEYS):
                    j = start + tl.arange(0, KEYS)
                    seen = (j < n_keys) & (j >= n_keys - sees)
                    tile = _tile(keys, j, seen, WIDTH, COLUMNS)
                    tile += _distances(of_distance, j, seen, span, WIDTH, COLUMNS)
                    scores = tl.sum(tile * q[None], 1)
                    scores += tl.load(of_scores + j, mask=seen, other=0.0)
                    scores = tl.where(seen, scores, float("-inf"))
                    now = tl.maximum(largest, tl.max(scores, 0))
                    # A row that has seen nothing yet.
                    anchor = tl.where(now == float("-inf"), 0.0, now)
                    weights = tl.exp(scores - anchor)
                    shrink = tl.exp(largest - anchor)
                    at = ((t * N_LAYERS + layer) * rows + own) * n_kept + n_kept - n_keys + j
                    dropped = weights * _factor(
                        kept_weights, at, seen, weights_scale, DROPS_WEIGHTS
                    )
                    v = _tile(values, j, seen, WIDTH, COLUMNS)
                    read = read * shrink + tl.sum(dropped[:, None] * v, 0)
                    total = total * shrink + tl.sum(weights, 0)
                    largest = now
                some = total > 0
                total = tl.where(some, total, 1.0)
                logarithm = tl.where(some, largest, 0.0) + tl.log(total)
                at = totals + (t * N_LAYERS + layer) * rows + own + tl.arange(0, 1)
                tl.store(at, logarithm)
                _store(
                    attended + of_token * (HEADS + 1) + head * WIDTH, read / total, WIDTH, COLUMNS
                )
            tl.debug_barrier()

            for start in range(0, D_MODEL, OUTPUTS):
                n = start + tl.arange(0, OUTPUTS)
                inside = n < D_MODEL
                weight = output + layer * (HEADS + 1) * D_MODEL
                a = attended + of_token * (HEADS + 1)
                y = _product(a, 0.0, 1.0, weight, n, HEADS + 1, D_MODEL, INPUTS, OUTPUTS)
                y *= _factor(kept_attention, of_token * D_MODEL + n, inside, scale, DROPS)
                y += tl.load(x + n, mask=inside, other=0.0)
                tl.store(sum_1 + n, y.to(streams.dtype.element_ty), mask=inside)
            tl.debug_barrier()
            if POST:
                mean, rstd = _moments(sum_1, D_MODEL, eps, True, STATE)
                normed = (_vector(sum_1, D_MODEL, STATE) - mean) * rstd
                normed *= _vector(gains + layer * D_MODEL, D_MODEL, STATE)
                normed += _vector(biases + layer * D_MODEL, D_MODEL, STATE)
                _store(between, normed, D_MODEL, STATE)
                tl.debug_barrier()

            # Feed-forward.
            mean, rstd = _moments(between, D_MODEL, eps, not POST, STATE)
            for start in range(0, D_FF, OUTPUTS):
                n = start + tl.arange(0, OUTPUTS)
                inside = n < D_FF
                weight = inner + layer * D_MODEL * D_FF
                y = _product(between, mean, rstd, weight, n, D_MODEL, D_FF, INPUTS, OUTPUTS)
                y += tl.load(inner_bias + layer * D_FF + n, mask=inside, other=0.0)
                if GELU:
                    at = before + of_token * D_FF + n
                    tl.store(at, y.to(before.dtype.element_ty), mask=inside)
                    y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
                else:
                    y = tl.where(y < 0, 0.0, y)
                y *= _factor(kept_activated, of_token * D_FF + n, inside, scale, DROPS)
                at = activated + of_token * (D_FF + 1) + n
                tl.store(at, y.to(activated.dtype.element_ty), mask=inside)
            tl.debug_barrier()
            for start in range(0, D_MODEL, OUTPUTS):
                n = start + tl.arange(0, OUTPUTS)
                inside = n < D_MODEL
                weight = outer + layer * (D_FF + 1) * D_MODEL
                a = activated + of_token * (D_FF + 1)
                y = _product(a, 0.0, 1.0, weight, n, D_FF + 1, D_MODEL, INPUTS, OUTPUTS)
                y *= _factor(kept_feed_forward, of_token * D_MODEL + n, inside, scale, DROPS)
                y += tl.load(between + n, mask=inside, other=0.0)
                tl.store(sum_2 + n, y.to(streams.dtype.element_ty), mask=inside)
            tl.debug_barrier()
            if POST:
                mean, rstd = _moments(sum_2, D_MODEL, eps, True, STATE)
                normed = (_vector(sum_2, D_MODEL, STATE) - mean) * rstd
                normed *= _vector(gains + (N_LAYERS + layer) * D_MODEL, D_MODEL, STATE)
                normed += _vector(biases + (N_LAYERS + layer) * D_MODEL, D_MODEL, STATE)
                _store(after, normed, D_MODEL, STATE)
                tl.debug_barrier()

        # The token's memory vector, and its keys and values.
        vector = vectors + (t * batch + row) * D_MODEL
        mixed = tl.zeros([STATE], tl.float32)
        for layer in range(N_LAYERS + 1):
            at = streams + ((2 * layer * n_steps + t) * batch + row) * D_MODEL
            mixed += tl.load(mix + layer).to(tl.float32) * _vector(at, D_MODEL, STATE)
        _store(vector, mixed, D_MODEL, STATE)
        tl.debug_barrier()
        mean, rstd = _moments(vector, D_MODEL, eps, NORMS_MEMORY, STATE)
        for start in range(0, KV, OUTPUTS):
            n = start + tl.arange(0, OUTPUTS)
            y = _product(vector, mean, rstd, memory, n, D_MODEL, KV, INPUTS, OUTPUTS)
            y += tl.load(memory_bias + n, mask=n < KV, other=0.0)
            at = _slot(n, row, batch, n_slots, n_old + t, N_HEADS, WIDTH)
            tl.store(kv + at, y.to(kv.dtype.element_ty), mask=n < KV)
        tl.debug_barrier()


@triton.jit
def backward(
    streams, sums, queries, activated, before, vectors, kv, totals,
    d_streams, d_added, d_inner, d_query, d_vectors, d_projected, d_kv, d_scores,
    query, position_keys, position_scores, output, inner, outer, memory, mix, gains, visible,
    kept_weights, kept_attention, kept_activated, kept_feed_forward,
    n_steps, batch, n_old, span, n_kept, eps, weights_scale, scale,
    D_MODEL: tl.constexpr, D_FF: tl.constexpr, N_LAYERS: tl.constexpr, N_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, POST: tl.constexpr, GELU: tl.constexpr,
    NORMS_MEMORY: tl.constexpr, SEES_PART: tl.constexpr, DROPS_WEIGHTS: tl.constexpr,
    DROPS: tl.constexpr, STATE: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Gradients of a row, from its last token to its first. Matrices come transposed.

    ``d_streams[0]`` of a token is room for products until it is set; so is ``d_query``.
    """
    row = tl.program_id(0).to(tl.int64)
    HEADS: tl.constexpr = N_HEADS * WIDTH
    KV: tl.constexpr = 2 * GROUPS * HEADS
    rows = N_HEADS * batch
    n_slots = n_old + n_steps
    for step in range(n_steps):
        t = n_steps - 1 - step
        n_keys = tl.minimum(span, n_old + t)
        low = n_old + t - n_keys
        sees = _see(visible, t, row, batch, n_keys, SEES_PART)
        scores_before = _seen_before(t, n_old, span) * N_LAYERS * rows
        room = d_streams + (t * batch + row) * D_MODEL

        # The memory vector, through keys and values from the tokens after, and from outside.
        vector = vectors + (t * batch + row) * D_MODEL
        projected = d_projected + (t * batch + row) * KV
        for start in range(0, KV, OUTPUTS):
            n = start + tl.arange(0, OUTPUTS)
            at = _slot(n, row, batch, n_slots, n_old + t, N_HEADS, WIDTH)
            tl.store(projected + n, tl.load(d_kv + at, mask=n < KV, other=0.0), mask=n < KV)
        tl.debug_barrier()
        for start in range(0, D_MODEL, OUTPUTS):
            n = start + tl.arange(0, OUTPUTS)
            y = _product(projected, 0.0, 1.0, memory, n, KV, D_MODEL, INPUTS, OUTPUTS)
            tl.store(room + n, y.to(d_streams.dtype.element_ty), mask=n < D_MODEL)
        tl.debug_barrier()
        d_vector = _vector(room, D_MODEL, STATE)
        if NORMS_MEMORY:
            d_vector = _through_norm(d_vector, vector, D_MODEL, eps, STATE)
        of_vector = d_vectors + (t * batch + row) * D_MODEL
        d_vector += _vector(of_vector, D_MODEL, STATE)
        _store(of_vector, d_vector, D_MODEL, STATE)
        top = d_streams + ((2 * N_LAYERS * n_steps + t) * batch + row) * D_MODEL
        g = _vector(top, D_MODEL, STATE) + tl.load(mix + N_LAYERS).to(tl.float32) * d_vector
        tl.debug_barrier()
        _store(top, g, D_MODEL, STATE)

        for upper in range(N_LAYERS):
            layer = N_LAYERS - 1 - upper
            of_token = (layer * n_steps + t) * batch + row
            of_attention = ((2 * layer * n_steps + t) * batch + row) * D_MODEL
            of_feed_forward = (((2 * layer + 1) * n_steps + t) * batch + row) * D_MODEL

            # Feed-forward.
            if POST:
                g *= _vector(gains + (N_LAYERS + layer) * D_MODEL, D_MODEL, STATE)
                g = _through_norm(g, sums + of_feed_forward, D_MODEL, eps, STATE)
            wide = tl.arange(0, STATE)
            at = of_token * D_MODEL + wide
            kept = _factor(kept_feed_forward, at, wide < D_MODEL, scale, DROPS)
            _store(d_added + of_feed_forward, g * kept, D_MODEL, STATE)
            tl.debug_barrier()
            for start in range(0, D_FF, OUTPUTS):
                n = start + tl.arange(0, OUTPUTS)
                inside = n < D_FF
                a = d_added + of_feed_forward
                weight = outer + layer * D_MODEL * D_FF
                y = _product(a, 0.0, 1.0, weight, n, D_MODEL, D_FF, INPUTS, OUTPUTS)
                y *= _factor(kept_activated, of_token * D_FF + n, inside, scale, DROPS)
                if GELU:
                    u = tl.load(before + of_token * D_FF + n, mask=inside, other=0.0).to(tl.float32)
                    density = 0.3989422804014327 * tl.exp(-0.5 * u * u)
                    y *= 0.5 * (1 + tl.erf(u * 0.7071067811865476)) + u * density
                else:
                    u = tl.load(activated + of_token * (D_FF + 1) + n, mask=inside, other=0.0)
                    y = tl.where(u > 0, y, 0.0)
                at_inner = d_inner + of_token * D_FF + n
                tl.store(at_inner, y.to(d_inner.dtype.element_ty), mask=inside)
            tl.debug_barrier()
            for start in range(0, D_MODEL, OUTPUTS):
                n = start + tl.arange(0, OUTPUTS)
                a = d_inner + of_token * D_FF
                weight = inner + layer * D_FF * D_MODEL
                y = _product(a, 0.0, 1.0, weight, n, D_FF, D_MODEL, INPUTS, OUTPUTS)
                tl.store(room + n, y.to(d_streams.dtype.element_ty), mask=n < D_MODEL)
            tl.debug_barrier()
            d_z = _vector(room, D_MODEL, STATE)
            if not POST:
                d_z = _through_norm(d_z, streams + of_feed_forward, D_MODEL, eps, STATE)
            g += d_z
            _store(d_streams + of_feed_forward, g, D_MODEL, STATE)

            # Attention.
            if POST:
                g *= _vector(gains + layer * D_MODEL, D_MODEL, STATE)
                g = _through_norm(g, sums + of_attention, D_MODEL, eps, STATE)
            kept = _factor(kept_attention, at, wide < D_MODEL, scale, DROPS)
            _store(d_added + of_attention, g * kept, D_MODEL, STATE)
            tl.debug_barrier()
            d_heads = d_query + of_token * HEADS
            for start in range(0, HEADS, OUTPUTS):
                n = start + tl.arange(0, OUTPUTS)
                a = d_added + of_attention
                weight = output + layer * D_MODEL * HEADS
                y = _product(a, 0.0, 1.0, weight, n, D_MODEL, HEADS, INPUTS, OUTPUTS)
                tl.store(d_heads + n, y.to(d_query.dtype.element_ty), mask=n < HEADS)
            tl.debug_barrier()
            group = layer % GROUPS
            for head in range(N_HEADS):
                own = head * batch + row
                of_row = (t * N_LAYERS + layer) * rows + own
                q = _vector(queries + of_row * WIDTH, WIDTH, COLUMNS)
                d_read = _vector(d_heads + head * WIDTH, WIDTH, COLUMNS)
                total = tl.load(totals + of_row)
                keys = ((group * rows + own) * n_slots + low) * WIDTH
                values = keys + GROUPS * rows * n_slots * WIDTH
                table = (layer * N_HEADS + head) * span
                of_distance = position_keys + table * WIDTH + span - n_keys
                of_scores = position_scores + table + span - n_keys
                d_q = tl.zeros([COLUMNS], tl.float32)
                shared = tl.zeros([1], tl.float32)
                # Twice over the slots, first for the sum that their scores' gradients share: by what
                # was read, which is rounded, scores would get a gradient where there is but one slot.
                for second in tl.static_range(2):
                    for start in range(0, n_keys, KEYS):
                        j = start + tl.arange(0, KEYS)
                        exists = j < n_keys
                        seen = exists & (j >= n_keys - sees)
                        tile = _tile(kv + keys, j, seen, WIDTH, COLUMNS)
                        tile += _distances(of_distance, j, seen, span, WIDTH, COLUMNS)
                        scores = tl.sum(tile * q[None], 1)
                        scores += tl.load(of_scores + j, mask=seen, other=0.0)
                        weights = tl.where(seen, tl.exp(scores - total), 0.0)
                        at_kept = of_row * n_kept + n_kept - n_keys + j
                        factor = _factor(kept_weights, at_kept, seen, weights_scale, DROPS_WEIGHTS)
                        v = _tile(kv + values, j, seen, WIDTH, COLUMNS)
                        d_weights = tl.sum(v * d_read[None], 1) * factor
                        if second == 0:
                            shared += tl.sum(weights * d_weights, 0)
                        else:
                            found = weights * (d_weights - shared)
                            at_scores = scores_before + (layer * rows + own) * n_keys + j
                            written = found.to(d_scores.dtype.element_ty)
                            tl.store(d_scores + at_scores, written, mask=exists)
                            d_q += tl.sum(found[:, None] * tile, 0)
                            _add(d_kv + keys, found[:, None] * q[None], j, seen, WIDTH, COLUMNS)
                            d_value = (weights * factor)[:, None] * d_read[None]
                            _add(d_kv + values, d_value, j, seen, WIDTH, COLUMNS)
                tl.debug_barrier()
                _store(d_heads + head * WIDTH, d_q, WIDTH, COLUMNS)
            tl.debug_barrier()
            for start in range(0, D_MODEL, OUTPUTS):
                n = start + tl.arange(0, OUTPUTS)
                weight = query + layer * HEADS * D_MODEL
                y = _product(d_heads, 0.0, 1.0, weight, n, HEADS, D_MODEL, INPUTS, OUTPUTS)
                tl.store(room + n, y.to(d_streams.dtype.element_ty), mask=n < D_MODEL)
            tl.debug_barrier()
            d_z = _vector(room, D_MODEL, STATE)
            if not POST:
                d_z = _through_norm(d_z, streams + of_attention, D_MODEL, eps, STATE)
            g += d_z + tl.load(mix + layer).to(tl.float32) * d_vector
            tl.debug_barrier()
            _store(d_streams + of_attention, g, D_MODEL, STATE)
        tl.debug_barrier()


@triton.jit
def _add(pointer, tile, slots, inside, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Add a tile to gradients of keys or values, which no other program has."""
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < WIDTH)[None]
    at = pointer + slots[:, None] * WIDTH + column[None]
    sums = tl.load(at, mask=mask, other=0.0).to(tl.float32) + tile
    tl.store(at, sums.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def position_gradients(
    queries, d_scores, d_position_keys, d_position_scores, n_steps, batch, n_old, span,
    N_LAYERS: tl.constexpr, N_HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of ``KEYS`` rows of one head's position tables: sums over rows and tokens."""
    parts = tl.cdiv(span, KEYS)
    head = tl.program_id(0) // parts
    layer = head // N_HEADS
    rows = N_HEADS * batch
    place = tl.program_id(0) % parts * KEYS + tl.arange(0, KEYS)
    column = tl.arange(0, COLUMNS)
    found = tl.zeros([KEYS, COLUMNS], tl.float32)
    found_scores = tl.zeros([KEYS], tl.float32)
    for t in range(n_steps):
        n_keys = tl.minimum(span, n_old + t)
        j = place - (span - n_keys)
        scores_before = _seen_before(t, n_old, span) * N_LAYERS * rows
        for start in range(0, batch, ROWS):
            row = start + tl.arange(0, ROWS)
            exists = row < batch
            own = layer * rows + head % N_HEADS * batch + row
            at = scores_before + own[:, None] * n_keys + j[None]
            mask = exists[:, None] & ((j >= 0) & (place < span))[None]
            scores = tl.load(d_scores + at, mask=mask, other=0.0).to(tl.float32)
            at = (t * N_LAYERS * rows + own).to(tl.int64)[:, None] * WIDTH + column[None]
            mask = exists[:, None] & (column < WIDTH)[None]
            q = tl.load(queries + at, mask=mask, other=0.0).to(tl.float32)
            found += tl.dot(tl.trans(scores), q, input_precision="ieee")
            found_scores += tl.sum(scores, 0)
    mask = (place < span)[:, None] & (column < WIDTH)[None]
    at = d_position_keys + (head * WIDTH + column)[None] * span + place[:, None]
    tl.store(at, found.to(d_position_keys.dtype.element_ty), mask=mask)
    at = d_position_scores + head * span + place
    tl.store(at, found_scores.to(d_position_scores.dtype.element_ty), mask=place < span)
