/* The Feedback Transformer's loop over tokens, forward and backward, for some rows of the batch: rows
   do not depend on each other, so every thread takes its own through all tokens.

   docs/annotated/feedback_backward.md derives it. It fills the same buffers as the loops in steps.py, in
   the same layouts, except that keys, values and their gradients are width first, [2, G, H * B, K, N],
   so that the scores of many slots are computed at once. Functions that allocate return null or 0 if
   out of memory. */

#include "loop.h"

typedef struct {
    int64_t steps, batch, d_model, n_heads, width, d_ff, n_layers, groups, n_old, span;
    int64_t kv_stride; /* between the numbers of a slot; forward may use part of a longer buffer */
    int64_t norms_memory;
    int64_t kept_slots; /* W, the last size of kept_weights */
    double eps, weights_scale, scale;
    /* FoldedWeights weights. All tensors are contiguous. */
    const REAL *query, *output, *inner, *outer, *memory, *query_bias, *position_keys, *position_scores,
        *inner_bias, *memory_bias, *mix, *gains, *biases;
    const int64_t *visible; /* [T, B]: the newest slots that a row sees at a step; null: all see all */
    /* What dropout keeps; null: all. */
    const unsigned char *kept_weights, *kept_attention, *kept_activated, *kept_feed_forward;
    REAL *streams, *queries, *attended, *activated, *vectors, *kv, *moments, *probabilities;
    REAL *sums, *before; /* null unless with post-norm, and with gelu */
    REAL *d_streams, *d_added, *d_inner, *d_query, *d_vectors, *d_projected, *d_kv, *d_position_keys,
        *d_position_scores, *d_scores;
} Loop;

/* ----- Parts of a step */

/* m[k, j] += a[k] w[j], where m holds [width, n] of what slots hold, stride apart */
static void outer_product(
    REAL *restrict m, const REAL *restrict a, const REAL *restrict w, int64_t stride, int64_t width,
    int64_t n
) {
    for (int64_t k = 0; k < width; k++)
        for (int64_t j = 0; j < n; j++) m[k * stride + j] += a[k] * w[j];
}

static REAL gelu_slope(REAL x) {
    double phi = exp(-0.5 * x * x) * 0.3989422804014327;
    return (REAL)(0.5 * (1 + erf(x * 0.7071067811865476)) + x * phi);
}

/* x[i] = scale x[i] where kept, else 0. A product, so that NaN stays. */
static void drop(REAL *restrict x, const unsigned char *restrict kept, REAL scale, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= scale * kept[i];
}

/* ----- What forward and backward share */

typedef struct {
    int64_t low, n; /* the slots that any row may attend to */
    int64_t at;     /* where its attention weights begin, [L, H * B, n] */
} Step;

static Step *steps_of(const Loop *f) {
    Step *s = malloc((size_t)f->steps * sizeof(Step));
    for (int64_t t = 0, at = 0; s && t < f->steps; t++) {
        int64_t high = f->n_old + t, low = high > f->span ? high - f->span : 0;
        s[t] = (Step){low, high - low, at};
        at += f->n_layers * f->n_heads * f->batch * s[t].n;
    }
    return s;
}

/* The first slot that the row b attends to at step t. */
static int64_t first_seen(const Loop *f, Step step, int64_t t, int64_t b) {
    int64_t n = f->visible ? f->visible[t * f->batch + b] : step.n;
    return step.low + step.n - (n < 0 ? 0 : n < step.n ? n : step.n);
}

/* The matrices, packed for products: sub-layer i has numbers 2 i and 2 i + 1; the last is memory's. */
typedef struct {
    int64_t n;
    Packed matrices[];
} Weights;

EXPORT void release(Weights *w) {
    for (int64_t i = 0; i < w->n; i++) free(w->matrices[i].panels);
    free(w);
}

/* a [rows, columns], for products with its rows, or transposed. */
static Packed pack_matrix(const REAL *a, int64_t rows, int64_t columns, int transposed) {
    return transposed ? pack(a, columns, rows, 1, columns) : pack(a, rows, columns, columns, 1);
}

/* Transposed for backward, without the biases' rows. */
EXPORT Weights *prepare(const Loop *f, int transposed) {
    int64_t D = f->d_model, F = f->d_ff, HK = f->n_heads * f->width, L = f->n_layers, bias = !transposed;
    Weights *w = calloc(1, sizeof(Weights) + (size_t)(4 * L + 1) * sizeof(Packed));
    if (!w) return NULL;
    Packed *p = w->matrices;
    for (int64_t l = 0; l < L; l++) {
        *p++ = pack_matrix(f->query + l * D * HK, D, HK, transposed);
        *p++ = pack_matrix(f->output + l * (HK + 1) * D, HK + bias, D, transposed);
        *p++ = pack_matrix(f->inner + l * D * F, D, F, transposed);
        *p++ = pack_matrix(f->outer + l * (F + 1) * D, F + bias, D, transposed);
    }
    *p = pack_matrix(f->memory, D, 2 * f->groups * HK, transposed);
    int can = 1;
    for (w->n = 0; w->n <= 4 * L; w->n++) can = can && w->matrices[w->n].panels;
    if (can) return w;
    release(w);
    return NULL;
}

/* Steps whose contributions to earlier slots' gradients are added together, while those are cached. */
#define BLOCK 8

/* Rows of the batch on their way through all steps, with room for what no one else needs. */
typedef struct {
    const Loop *f;
    const Weights *w;
    int64_t first, rows;
    Step *steps;
    REAL *z, *q, *projected, *slots, *read; /* [rows, D], [rows, HK], [rows, 2 G HK], [S], [K] */
    REAL *d_sum, *d_read; /* backward: [rows, D]; of a block's steps, [BLOCK, L, H * rows, K] */
} Share;

/* Zero if out of memory; it must be closed in any case. */
static int open_share(Share *s, const Loop *f, const Weights *w, int64_t first, int64_t end, int backward) {
    int64_t n = end - first, D = f->d_model, HK = f->n_heads * f->width, P = 2 * f->groups * HK;
    int64_t block = backward ? BLOCK * f->n_layers * HK * n : 0;
    *s = (Share){.f = f, .w = w, .first = first, .rows = n, .steps = steps_of(f)};
    size_t size = (size_t)(n * (2 * D + HK + P) + f->span + f->width + block);
    REAL *room = s->z = malloc(size * sizeof(REAL));
    if (!room) return 0;
    s->q = room += n * D, s->projected = room += n * HK, s->slots = room += n * P;
    s->read = room += f->span, s->d_sum = room += f->width, s->d_read = room + n * D;
    return s->steps != NULL;
}

static int close_share(Share *s, int done) {
    free(s->z);
    free(s->steps);
    return done;
}

/* Where the rows of a layer's or, likewise, a sub-layer's step begin in [L, T, B]. */
static int64_t rows_at(const Share *s, int64_t l, int64_t t) {
    return (l * s->f->steps + t) * s->f->batch + s->first;
}

static const unsigned char *kept_at(const unsigned char *kept, int64_t at) {
    return kept ? kept + at : NULL;
}

/* Of what sub-layer i adds. */
static const unsigned char *kept_added_at(const Share *s, int64_t i, int64_t t) {
    const unsigned char *kept = i % 2 ? s->f->kept_feed_forward : s->f->kept_attention;
    return kept_at(kept, rows_at(s, i / 2, t) * s->f->d_model);
}

/* Of one row's head in [T, L, H * B, W], for the slots that it attends to. */
static const unsigned char *kept_weights_at(const Loop *f, int64_t t, int64_t l, int64_t r, int64_t n) {
    int64_t R = f->n_heads * f->batch;
    return kept_at(f->kept_weights, ((t * f->n_layers + l) * R + r + 1) * f->kept_slots - n);
}

/* The n attention weights p as dropout leaves them. */
static const REAL *dropped(Share *s, const REAL *p, const unsigned char *kept, int64_t n) {
    if (!kept) return p;
    memcpy(s->slots, p, n * sizeof(REAL));
    drop(s->slots, kept, s->f->weights_scale, n);
    return s->slots;
}

/* The mean and, a batch further on, the rstd of a step's norm: of sub-layer i; last, of memory vectors. */
static REAL *moments_at(const Share *s, int64_t i, int64_t t) {
    return s->f->moments + rows_at(s, i, t) + (i * s->f->steps + t) * s->f->batch;
}

static void norm(Share *s, int64_t i, int64_t t, const REAL *x, REAL *out) {
    REAL *mean = moments_at(s, i, t);
    normalise(x, out, mean, mean + s->f->batch, s->rows, s->f->d_model, s->f->eps);
}

/* out = residual + the gradient g carried back through that norm of x */
static void back_through_norm(
    Share *s, int64_t i, int64_t t, const REAL *g, const REAL *x, const REAL *residual, REAL *out
) {
    int64_t size = s->f->d_model;
    const REAL *mean = moments_at(s, i, t), *rstd = mean + s->f->batch;
    for (int64_t i = 0; i < s->rows; i++, g += size, x += size, residual += size, out += size) {
        REAL a = 0, b = 0;
        for (int64_t d = 0; d < size; d++) {
            a += g[d];
            b += g[d] * (x[d] - mean[i]);
        }
        a /= size;
        b *= rstd[i] * rstd[i] / size;
        for (int64_t d = 0; d < size; d++)
            out[d] = residual[d] + rstd[i] * (g[d] - a - (x[d] - mean[i]) * b);
    }
}

/* Of the post-norm after sub-layer i; likewise biases. */
static const REAL *gain_at(const Loop *f, const REAL *gains, int64_t i) {
    return gains + (i % 2 * f->n_layers + i / 2) * f->d_model;
}

/* ----- Forward */

/* c = the stream before sub-layer i, normed unless with post-norm, times its first matrix. Inline, so that
   there is a product for each use: one for all takes a tenth longer. */
INLINE void multiply_given(
    Share *s, int64_t i, int64_t t, const REAL *bias, REAL *c, int64_t c_stride, int relu
) {
    const REAL *x = s->f->streams + rows_at(s, i, t) * s->f->d_model;
    if (!s->f->sums) {
        norm(s, i, t, x, s->z);
        x = s->z;
    }
    product(x, s->f->d_model, s->w->matrices + 2 * i, s->rows, bias, NULL, c, c_stride, relu);
}

/* The stream after sub-layer i: the one before + a p, with what dropout keeps of a p; then normed, with
   post-norm. Null a: nothing is added. */
static void add_product(Share *s, int64_t i, int64_t t, const REAL *a) {
    const Loop *f = s->f;
    const Packed *p = s->w->matrices + 2 * i + 1;
    int64_t D = f->d_model, n = s->rows * D, at = rows_at(s, i, t) * D;
    const unsigned char *kept = kept_added_at(s, i, t);
    const REAL *x = f->streams + at;
    REAL *out = f->streams + rows_at(s, i + 1, t) * D, *sum = f->sums ? f->sums + at : out;
    if (!a) {
        memcpy(sum, x, n * sizeof(REAL));
    } else if (kept) {
        product(a, p->depth, p, s->rows, NULL, NULL, sum, D, 0);
        drop(sum, kept, f->scale, n);
        for (int64_t j = 0; j < n; j++) sum[j] += x[j];
    } else {
        product(a, p->depth, p, s->rows, NULL, x, sum, D, 0);
    }
    if (!f->sums) return;
    const REAL *gain = gain_at(f, f->gains, i), *bias = gain_at(f, f->biases, i);
    norm(s, i, t, sum, out);
    for (int64_t j = 0; j < n; j += D)
        for (int64_t d = 0; d < D; d++) out[j + d] = out[j + d] * gain[d] + bias[d];
}

/* What the head h of row b reads, in s->read. */
static void read_slots(Share *s, int64_t l, int64_t t, int64_t h, int64_t b, const REAL *q) {
    const Loop *f = s->f;
    int64_t K = f->width, N = f->kv_stride, R = f->n_heads * f->batch, r = h * f->batch + b;
    int64_t at = (f->groups > 1 ? l : 0) * R + r, lh = l * f->n_heads + h;
    Step step = s->steps[t];
    int64_t low = first_seen(f, step, t, b), n = step.low + step.n - low;
    REAL *p = f->probabilities + step.at + (l * R + r + 1) * step.n - n;
    const unsigned char *kept = kept_weights_at(f, t, l, r, n);
    memcpy(f->queries + ((t * f->n_layers + l) * R + r) * K, q, K * sizeof(REAL));
    memset(s->read, 0, K * sizeof(REAL));
    if (!n) return;
    memcpy(p, f->position_scores + (lh + 1) * f->span - n, n * sizeof(REAL));
    add_rows(p, q, f->position_keys + (lh * K + 1) * f->span - n, f->span, K, n);
    add_rows(p, q, f->kv + at * K * N + low, N, K, n);
    softmax(p, n);
    const REAL *values = f->kv + (f->groups * R + at) * K * N + low;
    add_dots(s->read, dropped(s, p, kept, n), values, N, K, n);
}

static void attention(Share *s, int64_t l, int64_t t) {
    const Loop *f = s->f;
    int64_t H = f->n_heads, K = f->width, HK = H * K;
    REAL *attended = f->attended + rows_at(s, l, t) * (HK + 1);
    if (!s->steps[t].n) {
        add_product(s, 2 * l, t, NULL);
        return;
    }
    multiply_given(s, 2 * l, t, f->query_bias + l * HK, s->q, HK, 0);
    for (int64_t h = 0; h < H; h++)
        for (int64_t i = 0; i < s->rows; i++) {
            read_slots(s, l, t, h, s->first + i, s->q + i * HK + h * K);
            memcpy(attended + i * (HK + 1) + h * K, s->read, K * sizeof(REAL));
        }
    add_product(s, 2 * l, t, attended);
}

static void feed_forward(Share *s, int64_t l, int64_t t) {
    const Loop *f = s->f;
    int64_t F = f->d_ff, n = s->rows, at = rows_at(s, l, t);
    const REAL *bias = f->inner_bias + l * F;
    REAL *activated = f->activated + at * (F + 1);
    if (f->before) {
        REAL *before = f->before + at * F;
        multiply_given(s, 2 * l + 1, t, bias, before, F, 0);
        for (int64_t i = 0; i < n; i++) gelu(before + i * F, activated + i * (F + 1), F);
    } else {
        multiply_given(s, 2 * l + 1, t, bias, activated, F + 1, 1);
    }
    for (int64_t i = 0; f->kept_activated && i < n; i++) {
        REAL *row = activated + i * (F + 1);
        drop(row, f->kept_activated + (at + i) * F, f->scale, F);
    }
    add_product(s, 2 * l + 1, t, activated);
}

/* A token's slot in keys and values, r = 0 .. 2 G H of them, of a row of this share. */
static REAL *slot_at(const Share *s, REAL *kv, int64_t t, int64_t r, int64_t i) {
    const Loop *f = s->f;
    return kv + (r * f->batch + s->first + i) * f->width * f->kv_stride + f->n_old + t;
}

/* The token's memory vector, and its keys and values. */
static void memory_vector(Share *s, int64_t t) {
    const Loop *f = s->f;
    int64_t D = f->d_model, K = f->width, P = 2 * f->groups * f->n_heads * K, n = s->rows;
    REAL *vector = f->vectors + rows_at(s, 0, t) * D;
    memset(vector, 0, n * D * sizeof(REAL));
    for (int64_t l = 0; l <= f->n_layers; l++) {
        const REAL *state = f->streams + rows_at(s, 2 * l, t) * D;
        for (int64_t i = 0; i < n * D; i++) vector[i] += f->mix[l] * state[i];
    }
    if (f->norms_memory) {
        norm(s, 2 * f->n_layers, t, vector, s->z);
        vector = s->z;
    }
    product(vector, D, s->w->matrices + 4 * f->n_layers, n, f->memory_bias, NULL, s->projected, P, 0);
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < P / K; r++) {
            REAL *slot = slot_at(s, f->kv, t, r, i);
            for (int64_t k = 0; k < K; k++) slot[k * f->kv_stride] = s->projected[i * P + r * K + k];
        }
}

EXPORT int forward(const Loop *f, const Weights *w, int64_t first, int64_t end) {
    Share s;
    int can = open_share(&s, f, w, first, end, 0);
    for (int64_t t = 0; can && t < f->steps; t++) {
        for (int64_t l = 0; l < f->n_layers; l++) {
            attention(&s, l, t);
            feed_forward(&s, l, t);
        }
        memory_vector(&s, t);
    }
    return close_share(&s, can);
}

/* ----- Backward */

/* The gradients that later tokens gave this one's keys and values reach its memory vector. */
static const REAL *back_memory_vector(Share *s, int64_t t) {
    const Loop *f = s->f;
    const Packed *p = s->w->matrices + 4 * f->n_layers;
    int64_t D = f->d_model, K = f->width, P = p->depth, n = s->rows, at = rows_at(s, 0, t);
    REAL *d_projected = f->d_projected + at * P, *dm = f->d_vectors + at * D;
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < P / K; r++) {
            const REAL *slot = slot_at(s, f->d_kv, t, r, i);
            for (int64_t k = 0; k < K; k++) d_projected[i * P + r * K + k] = slot[k * f->kv_stride];
        }
    if (f->norms_memory) {
        product(d_projected, P, p, n, NULL, NULL, s->z, D, 0);
        back_through_norm(s, 2 * f->n_layers, t, s->z, f->vectors + at * D, dm, dm);
    } else {
        product(d_projected, P, p, n, NULL, dm, dm, D, 0);
    }
    return dm;
}

/* Returns the gradient of sub-layer i's sum, from that of the stream after it. c = that of what it adds,
   times its second matrix. */
static const REAL *back_through_sum(Share *s, int64_t i, int64_t t, REAL *c) {
    const Loop *f = s->f;
    const Packed *p = s->w->matrices + 2 * i + 1;
    int64_t D = f->d_model, n = s->rows * D, at = rows_at(s, i, t) * D;
    const REAL *g = f->d_streams + rows_at(s, i + 1, t) * D;
    REAL *d_added = f->d_added + at;
    const unsigned char *kept = kept_added_at(s, i, t);
    if (f->sums) {
        const REAL *gain = gain_at(f, f->gains, i);
        for (int64_t j = 0; j < n; j += D)
            for (int64_t d = 0; d < D; d++) s->z[j + d] = g[j + d] * gain[d];
        /* Nothing passes beside the norm. */
        memset(s->d_sum, 0, n * sizeof(REAL));
        back_through_norm(s, i, t, s->z, f->sums + at, s->d_sum, s->d_sum);
        g = s->d_sum;
    }
    if (g != d_added) memcpy(d_added, g, n * sizeof(REAL));
    if (kept) drop(d_added, kept, f->scale, n);
    product(d_added, D, p, s->rows, NULL, NULL, c, p->columns, 0);
    return g;
}

/* The gradient of the stream before sub-layer i, from those of its sum and of its first product. */
static void back_through_given(Share *s, int64_t i, int64_t t, const REAL *d_sum, const REAL *d_product) {
    const Loop *f = s->f;
    const Packed *p = s->w->matrices + 2 * i;
    int64_t at = rows_at(s, i, t) * f->d_model;
    REAL *g = f->sums ? f->d_streams + at : s->z;
    product(d_product, p->depth, p, s->rows, NULL, f->sums ? d_sum : NULL, g, f->d_model, 0);
    if (!f->sums) back_through_norm(s, i, t, g, f->streams + at, d_sum, f->d_streams + at);
}

static void back_feed_forward(Share *s, int64_t l, int64_t t) {
    const Loop *f = s->f;
    int64_t F = f->d_ff, n = s->rows, at = rows_at(s, l, t);
    REAL *d_inner = f->d_inner + at * F;
    const REAL *d_sum = back_through_sum(s, 2 * l + 1, t, d_inner);
    if (f->before) {
        const REAL *before = f->before + at * F;
        for (int64_t i = 0; i < n * F; i++) d_inner[i] *= gelu_slope(before[i]);
        if (f->kept_activated) drop(d_inner, f->kept_activated + at * F, f->scale, n * F);
    } else {
        /* What was dropped is not above 0 either. */
        const REAL *activated = f->activated + at * (F + 1);
        REAL scale = f->scale;
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < F; j++)
                d_inner[i * F + j] *= activated[i * (F + 1) + j] > 0 ? scale : 0;
    }
    back_through_given(s, 2 * l + 1, t, d_sum, d_inner);
}

/* Gradients of the query, into dq, and of the scores, for the head h of row b. */
static void back_read_slots(Share *s, int64_t l, int64_t t, int64_t h, int64_t b, const REAL *d_o, REAL *dq) {
    const Loop *f = s->f;
    int64_t K = f->width, N = f->kv_stride, R = f->n_heads * f->batch, r = h * f->batch + b;
    int64_t at = (f->groups > 1 ? l : 0) * R + r;
    Step step = s->steps[t];
    int64_t low = first_seen(f, step, t, b), n = step.low + step.n - low;
    int64_t weights = step.at + (l * R + r + 1) * step.n - n;
    const REAL *p = f->probabilities + weights;
    const unsigned char *kept = kept_weights_at(f, t, l, r, n);
    REAL *ds = f->d_scores + weights, sum = 0;
    memset(ds, 0, n * sizeof(REAL));
    add_rows(ds, d_o, f->kv + (f->groups * R + at) * K * N + low, N, K, n);
    if (kept) drop(ds, kept, f->weights_scale, n);
    for (int64_t j = 0; j < n; j++) sum += p[j] * ds[j];
    for (int64_t j = 0; j < n; j++) ds[j] = p[j] * (ds[j] - sum);
    add_dots(dq, ds, f->kv + at * K * N + low, N, K, n);
    int64_t table = ((l * f->n_heads + h) * K + 1) * f->span - n;
    add_dots(dq, ds, f->position_keys + table, f->span, K, n);
}

static void back_attention(Share *s, int64_t l, int64_t t) {
    const Loop *f = s->f;
    int64_t D = f->d_model, H = f->n_heads, K = f->width, HK = H * K, n = s->rows;
    REAL *d_query = f->d_query + rows_at(s, l, t) * HK;
    const REAL *d_sum = back_through_sum(s, 2 * l, t, s->q);
    memset(d_query, 0, n * HK * sizeof(REAL));
    if (!s->steps[t].n) {
        memcpy(f->d_streams + rows_at(s, 2 * l, t) * D, d_sum, n * D * sizeof(REAL));
        return;
    }
    for (int64_t h = 0; h < H; h++)
        for (int64_t i = 0; i < n; i++) {
            REAL *d_o = s->d_read + ((t % BLOCK * f->n_layers + l) * H * n + h * n + i) * K;
            memcpy(d_o, s->q + i * HK + h * K, K * sizeof(REAL));
            back_read_slots(s, l, t, h, s->first + i, d_o, d_query + i * HK + h * K);
        }
    back_through_given(s, 2 * l, t, d_sum, d_query);
}

/* What step t adds to the gradients of the keys and values in the slots from .. to that a row sees, for
   its head h. */
static void add_to_slots(Share *s, int64_t t, int64_t h, int64_t i, int64_t from, int64_t to) {
    const Loop *f = s->f;
    int64_t K = f->width, N = f->kv_stride, R = f->n_heads * f->batch, r = h * f->batch + s->first + i;
    Step step = s->steps[t];
    int64_t low = first_seen(f, step, t, s->first + i);
    if (from < low) from = low;
    if (from >= to) return;
    for (int64_t l = 0; l < f->n_layers; l++) {
        int64_t at = (f->groups > 1 ? l : 0) * R + r, slot = from - step.low;
        int64_t weights = step.at + (l * R + r) * step.n + slot;
        const REAL *q = f->queries + ((t * f->n_layers + l) * R + r) * K;
        const REAL *p = f->probabilities + weights;
        const REAL *d_o =
            s->d_read + ((t % BLOCK * f->n_layers + l) * f->n_heads * s->rows + h * s->rows + i) * K;
        const unsigned char *kept = kept_weights_at(f, t, l, r, step.n);
        p = dropped(s, p, kept_at(kept, slot), to - from);
        outer_product(f->d_kv + at * K * N + from, q, f->d_scores + weights, N, K, to - from);
        outer_product(f->d_kv + (f->groups * R + at) * K * N + from, d_o, p, N, K, to - from);
    }
}

/* This block's slots at once, since the next steps need them; all earlier ones at the block's end. */
static void keys_and_values(Share *s, int64_t t) {
    const Loop *f = s->f;
    int64_t first = t / BLOCK * BLOCK, border = f->n_old + first;
    int64_t last = first + BLOCK < f->steps ? first + BLOCK : f->steps;
    for (int64_t h = 0; h < f->n_heads; h++)
        for (int64_t i = 0; i < s->rows; i++) {
            add_to_slots(s, t, h, i, border, s->steps[t].low + s->steps[t].n);
            for (int64_t u = first; t == first && u < last; u++) add_to_slots(s, u, h, i, 0, border);
        }
}

/* The share of the memory vector in the gradient of a state, that below layer l. */
static void add_mixed(Share *s, int64_t l, int64_t t, const REAL *dm) {
    const Loop *f = s->f;
    REAL *d_state = f->d_streams + rows_at(s, 2 * l, t) * f->d_model;
    for (int64_t i = 0; i < s->rows * f->d_model; i++) d_state[i] += f->mix[l] * dm[i];
}

EXPORT int backward(const Loop *f, const Weights *w, int64_t first, int64_t end) {
    Share s;
    int can = open_share(&s, f, w, first, end, 1);
    for (int64_t t = f->steps - 1; can && t >= 0; t--) {
        const REAL *dm = back_memory_vector(&s, t);
        add_mixed(&s, f->n_layers, t, dm);
        for (int64_t l = f->n_layers - 1; l >= 0; l--) {
            back_feed_forward(&s, l, t);
            back_attention(&s, l, t);
            add_mixed(&s, l, t, dm);
        }
        keys_and_values(&s, t);
    }
    return close_share(&s, can);
}

/* After backward of all rows: the position tables of the pairs of a layer and a head, first to end. */
EXPORT int position_gradients(const Loop *f, int64_t first, int64_t end) {
    int64_t B = f->batch, H = f->n_heads, K = f->width, L = f->n_layers, R = H * B;
    Step *steps = steps_of(f);
    for (int64_t lh = first; steps && lh < end; lh++)
        for (int64_t t = f->steps - 1; t >= 0; t--) {
            Step step = steps[t];
            int64_t r = lh % H * B, l = lh / H;
            for (int64_t b = 0; b < B; b++) {
                int64_t n = step.low + step.n - first_seen(f, step, t, b);
                REAL *d_keys = f->d_position_keys + (lh * K + 1) * f->span - n;
                REAL *d_scores = f->d_position_scores + (lh + 1) * f->span - n;
                const REAL *q = f->queries + ((t * L + l) * R + r + b) * K;
                const REAL *ds = f->d_scores + step.at + (l * R + r + b + 1) * step.n - n;
                outer_product(d_keys, q, ds, f->span, K, n);
                for (int64_t j = 0; j < n; j++) d_scores[j] += ds[j];
            }
        }
    int can = steps != NULL;
    free(steps);
    return can;
}
