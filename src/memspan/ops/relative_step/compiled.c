/* One token of every row through a stack with relative positions, without gradients: the reader's step of
   Transformer-XL and the Compressive Transformer, and what it does to the latter's compressed slots.
   README.md says what it reads where. */

#include "stack.h"

/* Projections are queries, with u as their bias, keys and values: [3 H K, D]. Buffers of all layers are one
   tensor: hidden [L, B, C, D], keys and values [L, B, H, C, K], where C counts columns. */
typedef struct {
    Stack stack;
    int64_t columns, end; /* the token's own column */
    int64_t covered;      /* distances that are projected */
    int64_t most;         /* the largest number of slots that a row attends to */
    double scale;      /* of the scores */
    const int64_t *used; /* slots before end that a row attends to, [B] */
    REAL *hidden, *keys, *values;
    const REAL *position_keys, *position_scores; /* farthest first, [L, H, covered, K] and without K */
    REAL *received; /* may be null; [L, B, most + 1]: the attention that each slot gets is added */
} Step;

/* One head: from its query, its keys and values (the oldest first), and the same of n distances. */
INLINE void attend(
    REAL *attended, REAL *p, const REAL *q, const REAL *keys, const REAL *values,
    const REAL *position_keys, const REAL *position_scores, REAL scale, int64_t n, const int64_t K
) {
    for (int64_t j = 0; j < n; j++, keys += K, position_keys += K) {
        REAL sum = 0;
        for (int64_t k = 0; k < K; k++) sum += q[k] * (keys[k] + position_keys[k]);
        p[j] = scale * (sum + position_scores[j]);
    }
    softmax(p, n);
    memset(attended, 0, K * sizeof(REAL));
    add_rows(attended, p, values, K, n, K);
}

/* The heads of rows first .. end - 1 in layer l, from t->inside to t->attended, with p [most + 1] for
   scores. */
INLINE void attention_of(
    const Step *s, const Scratch *t, REAL *p, int64_t l, int64_t first, int64_t end, const int64_t K
) {
    int64_t B = s->stack.batch, H = s->stack.n_heads, C = s->columns;
    for (int64_t r = first * H; r < end * H; r++) {
        int64_t b = r / H, h = r % H, n = s->used[b] + 1, oldest = s->end + 1 - n;
        const REAL *q = t->inside + (b - first) * 3 * H * K + h * K;
        REAL *keys = s->keys + (l * B * H + r) * C * K, *values = s->values + (l * B * H + r) * C * K;
        int64_t distances = (l * H + h + 1) * s->covered - n;
        memcpy(keys + s->end * K, q + H * K, K * sizeof(REAL));
        memcpy(values + s->end * K, q + 2 * H * K, K * sizeof(REAL));
        attend(
            t->attended + (r - first * H) * K, p, q, keys + oldest * K, values + oldest * K,
            s->position_keys + distances * K, s->position_scores + distances, s->scale, n, K
        );
        if (!s->received) continue;
        REAL *received = s->received + (l * B + b + 1) * (s->most + 1) - n;
        for (int64_t j = 0; j < n; j++) received[j] += p[j];
    }
}

/* Rows first .. end - 1; false if out of memory. */
EXPORT int step(const Step *s, const Matrices *matrices, int64_t first, int64_t end) {
    Stack stack = s->stack;
    int64_t B = stack.batch, D = stack.d_model;
    stack.x += first * D, stack.batch = end - first;
    Scratch t = new_scratch(&stack);
    REAL *p = malloc((size_t)(s->most + 1) * sizeof(REAL));
    int can = t.z && p;
    for (int64_t l = 0; can && l < stack.n_layers; l++) {
        for (int64_t b = first; b < end; b++)
            memcpy(
                s->hidden + ((l * B + b) * s->columns + s->end) * D, s->stack.x + b * D,
                D * sizeof(REAL)
            );
        project(&stack, matrices, &t, l);
        /* Faster where the compiler knows the width. */
        switch (stack.width) {
            case 32: attention_of(s, &t, p, l, first, end, 32); break;
            case 64: attention_of(s, &t, p, l, first, end, 64); break;
            default: attention_of(s, &t, p, l, first, end, stack.width);
        }
        after_attention(&stack, matrices, &t, l);
    }
    if (can) final_norm(&stack, &t);
    free(t.z);
    free(p);
    return can;
}

/* Compressed slots made after a token, one in each of n rows. */
typedef struct {
    int64_t n;
    const int64_t *rows, *columns; /* [n]: columns they are put at */
    const int64_t *older, *kept;   /* [n]: the older ones' first column, and their number */
    const REAL *hidden;              /* [L, n, D] */
} Compressed;

/* Slots of one row and head, or of all of its hidden state: the older ones move in front of the new. */
static void put_in_front(REAL *slots, const Compressed *c, int64_t i, const REAL *new, int64_t width) {
    memmove(
        slots + (c->columns[i] - c->kept[i]) * width, slots + c->older[i] * width,
        c->kept[i] * width * sizeof(REAL)
    );
    memcpy(slots + c->columns[i] * width, new, width * sizeof(REAL));
}

/* Write compressed slots, with their keys and values, into the buffers; false if out of memory. */
EXPORT int insert(const Step *s, const Matrices *matrices, const Compressed *c) {
    Stack stack = s->stack;
    int64_t D = stack.d_model, H = stack.n_heads, K = stack.width, C = s->columns, P = stack.d_projected;
    /* Queries are not needed, but panels are whole. */
    int64_t skipped = H * K / PANEL * PANEL, n = c->n;
    stack.batch = n;
    Scratch t = new_scratch(&stack);
    if (!t.z) return 0;
    for (int64_t l = 0; l < stack.n_layers; l++) {
        const Layer *layer = stack.layers + l;
        const REAL *hidden = c->hidden + l * n * D;
        Packed keys_and_values = matrices[l].projections;
        keys_and_values.panels += skipped * D;
        keys_and_values.columns -= skipped;
        affine_norm(&stack, hidden, t.z, t.moments, layer->norm_weight, layer->norm_bias);
        product(
            t.z, D, &keys_and_values, n, layer->projections_bias + skipped, NULL,
            t.inside + skipped, P, 0
        );
        for (int64_t i = 0; i < n; i++) {
            int64_t row = l * s->stack.batch + c->rows[i];
            put_in_front(s->hidden + row * C * D, c, i, hidden + i * D, D);
            for (int64_t h = 0; h < H; h++) {
                const REAL *key = t.inside + i * P + (H + h) * K;
                put_in_front(s->keys + (row * H + h) * C * K, c, i, key, K);
                put_in_front(s->values + (row * H + h) * C * K, c, i, key + H * K, K);
            }
        }
    }
    free(t.z);
    return 1;
}
