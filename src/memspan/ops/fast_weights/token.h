/* The delta rule with a decay for single tokens, for compiled.c: of one head, and through a whole stack.

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

/* All contiguous: [heads of all rows, .]. */
typedef struct {
    int64_t share, K, V;
    const REAL *q, *k, *v, *beta, *log_decay;
    REAL *y;
    const REAL *before;
    REAL *after; /* may be `before` */
} OneToken;

/* Heads of keys first .. end - 1 of all rows. */
EXPORT int one_token(const OneToken *f, int64_t first, int64_t end) {
    int64_t K = f->K, V = f->V;
    for (int64_t r = first; r < end; r++)
        for (int64_t head = r * f->share; head < (r + 1) * f->share; head++)
            token_of(
                f->y + head * V, NULL, f->after + head * K * V, f->before + head * K * V, f->k + r * K,
                f->q + r * K, f->v + head * V, exp(f->log_decay[head]), f->beta[head], K, V
            );
    return 1;
}

/* ----- One token of every row through all layers of a Gated DeltaNet, without gradients */

/* Of a layer, beside what the stack has. */
typedef struct {
    const REAL *convolution; /* [taps, C], the token's own last */
    const REAL *rate, *step_bias; /* [H]: the logarithm of a decay is rate softplus(step + step_bias) */
    const REAL *gain; /* [V] */
    REAL *memory, *inputs; /* [B, H, K, V] and [B, taps - 1, C], written in place */
} GatedLayer;

/* The stack's heads and width are those of values. Projections are queries, keys, values, gates, and logits
   of beta and of the decay. */
typedef struct {
    Stack stack;
    int64_t key_heads, key_width, taps;
    double beta; /* the largest */
    double epsilon; /* inside the roots that normalise queries, keys and outputs */
    const GatedLayer *layers;
} GatedStep;

/* x = the convolution of x [C] and the inputs before it, which move on by one. */
INLINE void convolve_of(
    REAL *restrict x, REAL *restrict inputs, const REAL *restrict w, int64_t C, const int64_t taps
) {
    for (int64_t c = 0; c < C; c++) {
        REAL sum = w[(taps - 1) * C + c] * x[c];
        for (int64_t i = 0; i < taps - 1; i++) {
            REAL before = inputs[i * C + c];
            sum += w[i * C + c] * before;
            if (i) inputs[(i - 1) * C + c] = before;
        }
        if (taps > 1) inputs[(taps - 2) * C + c] = x[c];
        x[c] = sum;
    }
}

static void convolve(REAL *x, REAL *inputs, const REAL *w, int64_t C, int64_t taps) {
    if (taps == 4) convolve_of(x, inputs, w, C, 4);
    else convolve_of(x, inputs, w, C, taps);
}

/* Beyond 20 it is x itself, as in PyTorch. */
static REAL softplus(REAL x) { return x > 20 ? x : log1p(exp(x)); }

/* Rows first .. end - 1; false if out of memory. */
EXPORT int gated_step(const GatedStep *s, const Matrices *matrices, int64_t first, int64_t end) {
    Stack stack = s->stack;
    int64_t D = stack.d_model, H = stack.n_heads, V = stack.width, K = s->key_width, I = H * V;
    int64_t keys = s->key_heads * K, C = 2 * keys + I, P = stack.d_projected, share = H / s->key_heads;
    stack.x += first * D, stack.batch = end - first;
    Scratch t = new_scratch(&stack);
    for (int64_t l = 0; t.z && l < stack.n_layers; l++) {
        const GatedLayer *layer = s->layers + l;
        project(&stack, matrices, &t, l);
        for (int64_t b = first; b < end; b++) {
            REAL *q = t.inside + (b - first) * P, *k = q + keys, *v = k + keys, *gate = v + I;
            REAL *y = t.attended + (b - first) * I, *beta = gate + I, *step = beta + H;
            convolve(q, layer->inputs + b * (s->taps - 1) * C, layer->convolution, C, s->taps);
            for (int64_t c = 0; c < C + I; c++) q[c] *= sigmoid(q[c]);
            for (int64_t h = 0; h < 2 * s->key_heads; h++) {
                REAL *x = q + h * K, length = dot(x, x, K);
                REAL by = 1 / sqrt((length + s->epsilon) * (h < s->key_heads ? K : 1));
                for (int64_t i = 0; i < K; i++) x[i] *= by;
            }
            for (int64_t h = 0; h < H; h++, y += V) {
                REAL *w = layer->memory + (b * H + h) * K * V;
                REAL decay = exp(layer->rate[h] * softplus(step[h] + layer->step_bias[h]));
                int64_t at = h / share * K;
                token_of(y, NULL, w, w, k + at, q + at, v + h * V, decay, s->beta * sigmoid(beta[h]), K, V);
                REAL by = 1 / sqrt(dot(y, y, V) / V + s->epsilon);
                for (int64_t c = 0; c < V; c++) y[c] *= by * layer->gain[c] * gate[h * V + c];
            }
        }
        after_attention(&stack, matrices, &t, l);
    }
    if (t.z) final_norm(&stack, &t);
    int can = t.z != NULL;
    free(t.z);
    return can;
}
