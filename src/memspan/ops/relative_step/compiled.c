/* One token of every row through a stack with relative positions, without gradients: the reader's step of
   Transformer-XL and the Compressive Transformer. README.md says what it reads where. */

#include "stack.h"

/* Projections are queries, with u as their bias, keys and values: [3 H K, D]. Buffers of all layers are one
   tensor: hidden [L, B, C, D], keys and values [L, B, H, C, K], where C counts columns. */
typedef struct {
    Stack stack;
    long columns, end; /* the token's own column */
    long covered;      /* distances that are projected */
    long most;         /* the largest number of slots that a row attends to */
    double scale;      /* of the scores */
    const long long *used; /* slots before end that a row attends to, [B] */
    REAL *hidden, *keys, *values;
    const REAL *position_keys, *position_scores; /* farthest first, [L, H, covered, K] and without K */
    REAL *received; /* may be null; [L, B, most + 1]: the attention that each slot gets is added */
} Step;

/* One head: from its query, its keys and values (the oldest first), and the same of n distances. */
INLINE void attend(
    REAL *attended, REAL *p, const REAL *q, const REAL *keys, const REAL *values,
    const REAL *position_keys, const REAL *position_scores, REAL scale, long n, const long K
) {
    memcpy(p, position_scores, n * sizeof(REAL));
    add_dots(p, q, position_keys, K, n, K);
    add_dots(p, q, keys, K, n, K);
    for (long j = 0; j < n; j++) p[j] *= scale;
    softmax(p, n);
    memset(attended, 0, K * sizeof(REAL));
    add_rows(attended, p, values, K, n, K);
}

/* The heads of rows first .. end - 1 in layer l, from t->inside to t->attended, with p [most + 1] for
   scores. */
INLINE void attention_of(
    const Step *s, const Scratch *t, REAL *p, long l, long first, long end, const long K
) {
    long B = s->stack.batch, H = s->stack.n_heads, C = s->columns;
    for (long r = first * H; r < end * H; r++) {
        long b = r / H, h = r % H, n = s->used[b] + 1, oldest = s->end + 1 - n;
        const REAL *q = t->inside + (b - first) * 3 * H * K + h * K;
        REAL *keys = s->keys + (l * B * H + r) * C * K, *values = s->values + (l * B * H + r) * C * K;
        long distances = (l * H + h + 1) * s->covered - n;
        memcpy(keys + s->end * K, q + H * K, K * sizeof(REAL));
        memcpy(values + s->end * K, q + 2 * H * K, K * sizeof(REAL));
        attend(
            t->attended + (r - first * H) * K, p, q, keys + oldest * K, values + oldest * K,
            s->position_keys + distances * K, s->position_scores + distances, s->scale, n, K
        );
        if (!s->received) continue;
        REAL *received = s->received + (l * B + b + 1) * (s->most + 1) - n;
        for (long j = 0; j < n; j++) received[j] += p[j];
    }
}

/* Rows first .. end - 1; false if out of memory. */
int step(const Step *s, const Matrices *matrices, long first, long end) {
    Stack stack = s->stack;
    long B = stack.batch, D = stack.d_model;
    stack.x += first * D, stack.batch = end - first;
    Scratch t = new_scratch(&stack);
    REAL *p = malloc((size_t)(s->most + 1) * sizeof(REAL));
    int can = t.z && p;
    for (long l = 0; can && l < stack.n_layers; l++) {
        for (long b = first; b < end; b++)
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
