/* The delta rule with a decay for single tokens of one head, for compiled.c.

   Columns of a memory do not depend on each other: of a few at a time it is read once, for key and query
   together, and then written. */

/* `vectors` vectors of columns: to = decay from + k u, y = q to, with u = beta z and z = v - decay k from.
   `to` may be `from`; kq is k q. */
INLINE void token_columns(
    REAL *y, REAL *z, REAL *to, const REAL *from, int64_t stride, const REAL *k, const REAL *q,
    const REAL *v, REAL kq, REAL decay, REAL beta, int64_t K, const int64_t vectors
) {
    Lanes by_key[8] = {0}, by_query[8] = {0};
    for (int64_t i = 0; i < K; i++)
        for (int64_t c = 0; c < vectors; c++) {
            Lanes w = ((const Lanes *)(from + i * stride))[c];
            KEEP(w);
            by_key[c] += k[i] * w, by_query[c] += q[i] * w;
        }
    for (int64_t c = 0; c < vectors; c++) {
        Lanes error = ((const Lanes *)v)[c] - decay * by_key[c];
        if (z) ((Lanes *)z)[c] = error;
        by_key[c] = beta * error;
        ((Lanes *)y)[c] = decay * by_query[c] + kq * by_key[c];
    }
    for (int64_t i = 0; i < K; i++)
        for (int64_t c = 0; c < vectors; c++)
            ((Lanes *)(to + i * stride))[c] =
                decay * ((const Lanes *)(from + i * stride))[c] + k[i] * by_key[c];
}

/* A token of one head, whose memory is [K, V]; z may be null. */
static void token_of(
    REAL *y, REAL *z, REAL *to, const REAL *from, const REAL *k, const REAL *q, const REAL *v, REAL decay,
    REAL beta, int64_t K, int64_t V
) {
    REAL kq = dot(k, q, K);
    int64_t c = 0;
#define COLUMNS(n)                        \
    for (; c + n * LANES <= V; c += n * LANES) \
        token_columns(y + c, z ? z + c : NULL, to + c, from + c, V, k, q, v + c, kq, decay, beta, K, n)
    if (BYTES == 64) COLUMNS(8);
    COLUMNS(4);
    COLUMNS(1);
#undef COLUMNS
    for (; c < V; c++) {
        REAL by_key = 0, by_query = 0;
        for (int64_t i = 0; i < K; i++) by_key += k[i] * from[i * V + c], by_query += q[i] * from[i * V + c];
        REAL error = v[c] - decay * by_key, u = beta * error;
        if (z) z[c] = error;
        y[c] = decay * by_query + kq * u;
        for (int64_t i = 0; i < K; i++) to[i * V + c] = decay * from[i * V + c] + k[i] * u;
    }
}

/* Fewer tokens than these are faster one by one than as a chunk. */
#define FEW 8

/* All tokens, without saved memories; heads of keys first .. end - 1 of all rows. */
static int forward_tokens(const Loop *f, int64_t first, int64_t end) {
    int64_t K = f->n_features, V = f->value_width;
    for (int64_t r = first; r < end; r++)
        for (int64_t g = 0; g < f->share; g++) {
            int64_t b = r / f->n_heads, h = r % f->n_heads, head = h * f->share + g;
            int64_t at = (r * f->share + g) * K * V;
            for (int64_t t = 0; t < f->steps; t++)
                token_of(
                    TOKEN(f->y, b, head, t), f->errors.data ? TOKEN(f->errors, b, head, t) : NULL,
                    f->after + at, t ? f->after + at : f->before + at, TOKEN(f->k, b, h, t),
                    TOKEN(f->q, b, h, t), TOKEN(f->v, b, head, t), exp(*TOKEN(f->log_decay, b, head, t)),
                    *TOKEN(f->beta, b, head, t), K, V
                );
        }
    return 1;
}

/* All contiguous: [heads of all rows, steps, .], memories [heads of all rows, K, V]. */
typedef struct {
    int64_t share, steps, K, V;
    const REAL *q, *k, *v, *beta, *log_decay;
    REAL *y;
    const REAL *before;
    REAL *after; /* may be `before` */
} FewTokens;

/* Heads of keys first .. end - 1 of all rows. */
EXPORT int few_tokens(const FewTokens *f, int64_t first, int64_t end) {
    int64_t K = f->K, V = f->V, T = f->steps;
    for (int64_t r = first; r < end; r++)
        for (int64_t head = r * f->share; head < (r + 1) * f->share; head++) {
            REAL *after = f->after + head * K * V;
            for (int64_t t = 0; t < T; t++) {
                int64_t own = head * T + t, of_keys = (r * T + t) * K;
                token_of(
                    f->y + own * V, NULL, after, t ? after : f->before + head * K * V, f->k + of_keys,
                    f->q + of_keys, f->v + own * V, exp(f->log_decay[own]), f->beta[own], K, V
                );
            }
        }
    return 1;
}
