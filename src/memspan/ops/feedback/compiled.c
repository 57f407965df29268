/* The Feedback Transformer's loop over tokens, forward and backward, for some rows of the batch: rows
   do not depend on each other, so every thread takes its own through all tokens.

   docs/annotated/feedback_backward.md derives it. It fills the same buffers as the loops in steps.py, in
   the same layouts, except that keys, values and their gradients are width first, [2, G, H * B, K, N],
   so that the scores of many slots are computed at once. Functions that allocate return null or 0 if
   out of memory. */

#include "loop.h"

typedef struct {
    long steps, batch, d_model, n_heads, width, d_ff, n_layers, groups, n_old, span, gelu;
    long kv_stride; /* between the numbers of a slot; forward may use part of a longer buffer */
    long norms_memory, post_norm;
    long kept_slots; /* W, the last size of kept_weights */
    double eps, weights_scale, scale;
    /* FoldedWeights weights. All tensors are contiguous. */
    const REAL *query, *query_bias, *position_keys, *position_scores, *output, *inner, *inner_bias,
        *outer, *memory, *memory_bias, *mix, *gains, *biases;
    const REAL *additive_mask, *has_memory; /* may be null */
    /* What dropout keeps; null: all. */
    const unsigned char *kept_weights, *kept_attention, *kept_activated, *kept_feed_forward;
    REAL *states, *middles, *sums, *queries, *attended, *activated, *before, *vectors, *kv, *moments,
        *memory_moments, *probabilities;
    const REAL *d_out, *d_vectors;
    REAL *d_states, *d_middles, *d_attention, *d_feed_forward, *d_inner, *d_query, *d_first, *d_mixed,
        *d_projected, *d_kv, *d_position_keys, *d_position_scores;
    REAL *d_scores; /* laid out as probabilities */
} Loop;

/* ----- Parts of a step */

/* m[k, j] += a[k] w[j], where m holds [width, n] of what slots hold, stride apart */
static void outer_product(
    REAL *restrict m, const REAL *restrict a, const REAL *restrict w, long stride, long width,
    long n
) {
    for (long k = 0; k < width; k++)
        for (long j = 0; j < n; j++) m[k * stride + j] += a[k] * w[j];
}

/* out = residual + the gradient g carried back through the norm of x */
static void back_through_norm(
    const REAL *g, const REAL *x, const REAL *mean, const REAL *rstd, const REAL *residual,
    REAL *out, long rows, long size
) {
    for (long i = 0; i < rows; i++, g += size, x += size, residual += size, out += size) {
        REAL a = 0, b = 0;
        for (long d = 0; d < size; d++) {
            a += g[d];
            b += g[d] * (x[d] - mean[i]);
        }
        a /= size;
        b *= rstd[i] * rstd[i] / size;
        for (long d = 0; d < size; d++)
            out[d] = residual[d] + rstd[i] * (g[d] - a - (x[d] - mean[i]) * b);
    }
}

static REAL gelu_slope(REAL x) {
    double phi = exp(-0.5 * x * x) * 0.3989422804014327;
    return (REAL)(0.5 * (1 + erf(x * M_SQRT1_2)) + x * phi);
}

/* x[i] = scale x[i] where kept, else 0. A product, so that NaN stays. */
static void drop(REAL *restrict x, const unsigned char *restrict kept, REAL scale, long n) {
    for (long i = 0; i < n; i++) x[i] *= scale * kept[i];
}

/* ----- What forward and backward share */

typedef struct {
    long low, n; /* the slots it attends to */
    long at;     /* where its attention weights begin, [L, H * B, n] */
} Step;

static Step *steps_of(const Loop *f) {
    Step *s = malloc((size_t)f->steps * sizeof(Step));
    for (long t = 0, at = 0; s && t < f->steps; t++) {
        long high = f->n_old + t, low = high > f->span ? high - f->span : 0;
        s[t] = (Step){low, high - low, at};
        at += f->n_layers * f->n_heads * f->batch * s[t].n;
    }
    return s;
}

/* The matrices of all layers, packed for products. */
typedef struct {
    long n;
    Packed *query, *output, *inner, *outer, memory;
} Weights;

void release(Weights *w) {
    for (long i = 0; w->query && i < 4 * w->n; i++) free(w->query[i].panels);
    free(w->memory.panels);
    free(w->query);
    free(w);
}

/* a [rows, columns], for products with its rows, or transposed. */
static Packed pack_matrix(const REAL *a, long rows, long columns, int transposed) {
    return transposed ? pack(a, columns, rows, 1, columns) : pack(a, rows, columns, columns, 1);
}

/* Transposed for backward, without the biases' rows. */
Weights *prepare(const Loop *f, int transposed) {
    long D = f->d_model, F = f->d_ff, HK = f->n_heads * f->width, G = f->groups, L = f->n_layers;
    Weights *w = calloc(1, sizeof(Weights));
    if (!w) return NULL;
    w->n = L;
    w->query = calloc(4 * (size_t)L, sizeof(Packed));
    int can = w->query != NULL;
    if (can) {
        w->output = w->query + L, w->inner = w->query + 2 * L, w->outer = w->query + 3 * L;
        for (long l = 0; l < L; l++) {
            w->query[l] = pack_matrix(f->query + l * D * HK, D, HK, transposed);
            w->output[l] = pack_matrix(f->output + l * (HK + 1) * D, HK + !transposed, D, transposed);
            w->inner[l] = pack_matrix(f->inner + l * D * F, D, F, transposed);
            w->outer[l] = pack_matrix(f->outer + l * (F + 1) * D, F + !transposed, D, transposed);
        }
        w->memory = pack_matrix(f->memory, D, 2 * G * HK, transposed);
        can = w->memory.panels != NULL;
        for (long i = 0; i < 4 * L; i++) can = can && w->query[i].panels;
    }
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
    long first, rows;
    Step *steps;
    REAL *z, *q, *projected, *slots, *read; /* [rows, D], [rows, HK], [rows, 2 G HK], [S], [K] */
    REAL *d_sum, *d_added; /* backward: [rows, D] */
    REAL *d_read; /* and of a block's steps, [BLOCK, L, H * rows, K] */
} Share;

/* Zero if out of memory; it must be closed in any case. */
static int open_share(Share *s, const Loop *f, const Weights *w, long first, long end, int backward) {
    long n = end - first, D = f->d_model, HK = f->n_heads * f->width, P = 2 * f->groups * HK;
    long block = backward ? BLOCK * f->n_layers * HK * n : 0;
    *s = (Share){.f = f, .w = w, .first = first, .rows = n, .steps = steps_of(f)};
    size_t size = (size_t)(n * (3 * D + HK + P) + f->span + f->width + block);
    REAL *room = s->z = malloc(size * sizeof(REAL));
    if (!room) return 0;
    s->q = room += n * D, s->projected = room += n * HK, s->slots = room += n * P;
    s->read = room += f->span, s->d_sum = room += f->width, s->d_added = room += n * D;
    s->d_read = room + n * D;
    return s->steps != NULL;
}

static int close_share(Share *s, int done) {
    free(s->z);
    free(s->steps);
    return done;
}

/* Where a layer's and a step's rows begin in [L, T, B]. */
static long rows_at(const Share *s, long l, long t) {
    return (l * s->f->steps + t) * s->f->batch + s->first;
}

/* Of the norms in [L, T, 4, B]: attention's mean and, a batch further on, rstd; then feed-forward's. */
static REAL *moments_at(const Share *s, long l, long t, int part) {
    return s->f->moments + ((l * s->f->steps + t) * 4 + 2 * part) * s->f->batch + s->first;
}

static const unsigned char *kept_at(const unsigned char *kept, long at) {
    return kept ? kept + at : NULL;
}

/* Of one row's head in [T, L, H * B, W], for the slots that it attends to. */
static const unsigned char *kept_weights_at(const Loop *f, long t, long l, long r, long n) {
    long R = f->n_heads * f->batch;
    return kept_at(f->kept_weights, ((t * f->n_layers + l) * R + r + 1) * f->kept_slots - n);
}

/* The n attention weights p as dropout leaves them. */
static const REAL *dropped(Share *s, const REAL *p, const unsigned char *kept, long n) {
    if (!kept) return p;
    memcpy(s->slots, p, n * sizeof(REAL));
    drop(s->slots, kept, s->f->weights_scale, n);
    return s->slots;
}

/* ----- Forward */

/* What a sub-layer is given: with post-norm x itself. */
static const REAL *norm_before(Share *s, long l, long t, int part, const REAL *x) {
    const Loop *f = s->f;
    if (f->post_norm) return x;
    REAL *mean = moments_at(s, l, t, part);
    normalise(x, s->z, mean, mean + f->batch, s->rows, f->d_model, f->eps);
    return s->z;
}

/* out = x + a p, with what dropout keeps of a p; then normed, with post-norm. Null a: out = x. */
static void add_product(
    Share *s, long l, long t, int part, const REAL *a, const Packed *p, const REAL *x, REAL *out
) {
    const Loop *f = s->f;
    long D = f->d_model, n = s->rows * D, at = rows_at(s, l, t) * D;
    const unsigned char *kept = part ? f->kept_feed_forward : f->kept_attention;
    REAL *sum = f->post_norm ? f->sums + part * f->n_layers * f->steps * f->batch * D + at : out;
    if (!a) {
        memcpy(sum, x, n * sizeof(REAL));
    } else if (kept) {
        product(a, p->depth, p, s->rows, NULL, NULL, sum, D, 0);
        drop(sum, kept + at, f->scale, n);
        for (long i = 0; i < n; i++) sum[i] += x[i];
    } else {
        product(a, p->depth, p, s->rows, NULL, x, sum, D, 0);
    }
    if (!f->post_norm) return;
    REAL *mean = moments_at(s, l, t, part);
    const REAL *gain = f->gains + (part * f->n_layers + l) * D;
    const REAL *bias = f->biases + (part * f->n_layers + l) * D;
    normalise(sum, out, mean, mean + f->batch, s->rows, D, f->eps);
    for (long i = 0; i < n; i += D)
        for (long d = 0; d < D; d++) out[i + d] = out[i + d] * gain[d] + bias[d];
}

/* What the head h of row b reads, in s->read. */
static void read_slots(Share *s, long l, long t, long h, long b, const REAL *q) {
    const Loop *f = s->f;
    long K = f->width, N = f->kv_stride, R = f->n_heads * f->batch, r = h * f->batch + b;
    long at = (f->groups > 1 ? l : 0) * R + r, lh = l * f->n_heads + h;
    Step step = s->steps[t];
    REAL *p = f->probabilities + step.at + (l * R + r) * step.n;
    const unsigned char *kept = kept_weights_at(f, t, l, r, step.n);
    memcpy(f->queries + ((t * f->n_layers + l) * R + r) * K, q, K * sizeof(REAL));
    memcpy(p, f->position_scores + (lh + 1) * f->span - step.n, step.n * sizeof(REAL));
    add_rows(p, q, f->position_keys + (lh * K + 1) * f->span - step.n, f->span, K, step.n);
    add_rows(p, q, f->kv + at * K * N + step.low, N, K, step.n);
    if (f->additive_mask)
        for (long j = step.low; j < f->n_old; j++)
            p[j - step.low] += f->additive_mask[b * f->n_old + j];
    softmax(p, step.n);
    const REAL *values = f->kv + (f->groups * R + at) * K * N + step.low;
    memset(s->read, 0, K * sizeof(REAL));
    add_dots(s->read, dropped(s, p, kept, step.n), values, N, K, step.n);
}

static void attention(Share *s, long l, long t) {
    const Loop *f = s->f;
    long D = f->d_model, H = f->n_heads, K = f->width, HK = H * K;
    const REAL *x = f->states + rows_at(s, l, t) * D;
    REAL *attended = f->attended + rows_at(s, l, t) * (HK + 1);
    REAL *middle = f->middles + rows_at(s, l, t) * D;
    if (!s->steps[t].n) {
        add_product(s, l, t, 0, NULL, NULL, x, middle);
        return;
    }
    const REAL *given = norm_before(s, l, t, 0, x);
    product(given, D, s->w->query + l, s->rows, f->query_bias + l * HK, NULL, s->q, HK, 0);
    for (long h = 0; h < H; h++)
        for (long i = 0; i < s->rows; i++) {
            read_slots(s, l, t, h, s->first + i, s->q + i * HK + h * K);
            REAL has_memory = t == 0 && f->has_memory ? f->has_memory[s->first + i] : 1;
            for (long k = 0; k < K; k++)
                attended[i * (HK + 1) + h * K + k] = has_memory * s->read[k];
        }
    add_product(s, l, t, 0, attended, s->w->output + l, x, middle);
}

static void feed_forward(Share *s, long l, long t) {
    const Loop *f = s->f;
    long D = f->d_model, F = f->d_ff, n = s->rows, at = rows_at(s, l, t);
    const REAL *middle = f->middles + at * D, *z = norm_before(s, l, t, 1, middle);
    const REAL *bias = f->inner_bias + l * F;
    REAL *activated = f->activated + at * (F + 1);
    if (f->gelu) {
        REAL *before = f->before + at * F;
        product(z, D, s->w->inner + l, n, bias, NULL, before, F, 0);
        for (long i = 0; i < n; i++) gelu(before + i * F, activated + i * (F + 1), F);
    } else {
        product(z, D, s->w->inner + l, n, bias, NULL, activated, F + 1, 1);
    }
    for (long i = 0; f->kept_activated && i < n; i++) {
        REAL *row = activated + i * (F + 1);
        drop(row, f->kept_activated + (at + i) * F, f->scale, F);
    }
    add_product(
        s, l, t, 1, activated, s->w->outer + l, middle, f->states + rows_at(s, l + 1, t) * D
    );
}

/* The token's memory vector, and its keys and values. */
static void memory_vector(Share *s, long t) {
    const Loop *f = s->f;
    long D = f->d_model, H = f->n_heads, K = f->width, C = 2 * f->groups, P = C * H * K, n = s->rows;
    REAL *vector = f->vectors + rows_at(s, 0, t) * D;
    memset(vector, 0, n * D * sizeof(REAL));
    for (long l = 0; l <= f->n_layers; l++) {
        const REAL *state = f->states + rows_at(s, l, t) * D;
        for (long i = 0; i < n * D; i++) vector[i] += f->mix[l] * state[i];
    }
    if (f->norms_memory) {
        REAL *mean = f->memory_moments + 2 * t * f->batch + s->first;
        normalise(vector, s->z, mean, mean + f->batch, n, D, f->eps);
        vector = s->z;
    }
    product(vector, D, &s->w->memory, n, f->memory_bias, NULL, s->projected, P, 0);
    for (long i = 0; i < n; i++)
        for (long c = 0; c < C; c++)
            for (long h = 0; h < H; h++) {
                long r = c * H * f->batch + h * f->batch + s->first + i;
                for (long k = 0; k < K; k++)
                    f->kv[(r * K + k) * f->kv_stride + f->n_old + t] =
                        s->projected[i * P + (c * H + h) * K + k];
            }
}

int forward(const Loop *f, const Weights *w, long first, long end) {
    Share s;
    int can = open_share(&s, f, w, first, end, 0);
    for (long t = 0; can && t < f->steps; t++) {
        for (long l = 0; l < f->n_layers; l++) {
            attention(&s, l, t);
            feed_forward(&s, l, t);
        }
        memory_vector(&s, t);
    }
    return close_share(&s, can);
}

/* ----- Backward */

/* The gradients that later tokens gave this one's keys and values reach its memory vector. */
static const REAL *back_memory_vector(Share *s, long t) {
    const Loop *f = s->f;
    long D = f->d_model, H = f->n_heads, K = f->width, C = 2 * f->groups, P = C * H * K, n = s->rows;
    long at = rows_at(s, 0, t);
    REAL *d_projected = f->d_projected + at * P, *dm = f->d_mixed + at * D;
    const REAL *from_outside = f->d_vectors + at * D;
    for (long i = 0; i < n; i++)
        for (long c = 0; c < C; c++)
            for (long h = 0; h < H; h++) {
                long r = c * H * f->batch + h * f->batch + s->first + i;
                for (long k = 0; k < K; k++)
                    d_projected[i * P + (c * H + h) * K + k] =
                        f->d_kv[(r * K + k) * f->kv_stride + f->n_old + t];
            }
    if (f->norms_memory) {
        const REAL *mean = f->memory_moments + 2 * t * f->batch + s->first;
        product(d_projected, P, &s->w->memory, n, NULL, NULL, s->z, D, 0);
        back_through_norm(s->z, f->vectors + at * D, mean, mean + f->batch, from_outside, dm, n, D);
    } else {
        product(d_projected, P, &s->w->memory, n, NULL, from_outside, dm, D, 0);
    }
    return dm;
}

/* From the gradient g of what add_product made to that of its sum, returned, and of a p, in d_added. */
static const REAL *back_through_sum(
    Share *s, long l, long t, int part, const REAL *g, REAL *d_added
) {
    const Loop *f = s->f;
    long D = f->d_model, n = s->rows * D, at = rows_at(s, l, t) * D;
    const unsigned char *kept = part ? f->kept_feed_forward : f->kept_attention;
    if (f->post_norm) {
        const REAL *sum = f->sums + part * f->n_layers * f->steps * f->batch * D + at;
        const REAL *mean = moments_at(s, l, t, part), *gain = f->gains + (part * f->n_layers + l) * D;
        for (long i = 0; i < n; i += D)
            for (long d = 0; d < D; d++) s->z[i + d] = g[i + d] * gain[d];
        /* Nothing passes beside the norm. */
        memset(s->d_sum, 0, n * sizeof(REAL));
        back_through_norm(s->z, sum, mean, mean + f->batch, s->d_sum, s->d_sum, s->rows, D);
        g = s->d_sum;
    }
    if (g != d_added) memcpy(d_added, g, n * sizeof(REAL));
    if (kept) drop(d_added, kept + at, f->scale, n);
    return g;
}

/* out = residual + the gradient of x, which a sub-layer was given: d_product p, through any norm before. */
static void back_through_given(
    Share *s, long l, long t, int part, const REAL *d_product, const Packed *p, const REAL *x,
    const REAL *residual, REAL *out
) {
    const Loop *f = s->f;
    long D = f->d_model;
    if (f->post_norm) {
        product(d_product, p->depth, p, s->rows, NULL, residual, out, D, 0);
        return;
    }
    const REAL *mean = moments_at(s, l, t, part);
    product(d_product, p->depth, p, s->rows, NULL, NULL, s->z, D, 0);
    back_through_norm(s->z, x, mean, mean + f->batch, residual, out, s->rows, D);
}

static void back_feed_forward(Share *s, long l, long t) {
    const Loop *f = s->f;
    long D = f->d_model, F = f->d_ff, n = s->rows, at = rows_at(s, l, t);
    REAL *d_inner = f->d_inner + at * F, *d_added = f->d_feed_forward + at * D;
    const REAL *d_sum = back_through_sum(s, l, t, 1, f->d_states + at * D, d_added);
    product(d_added, D, s->w->outer + l, n, NULL, NULL, d_inner, F, 0);
    if (f->gelu) {
        const REAL *before = f->before + at * F;
        for (long i = 0; i < n * F; i++) d_inner[i] *= gelu_slope(before[i]);
        if (f->kept_activated) drop(d_inner, f->kept_activated + at * F, f->scale, n * F);
    } else {
        /* What was dropped is not above 0 either. */
        const REAL *activated = f->activated + at * (F + 1);
        REAL scale = f->scale;
        for (long i = 0; i < n; i++)
            for (long j = 0; j < F; j++)
                d_inner[i * F + j] *= activated[i * (F + 1) + j] > 0 ? scale : 0;
    }
    const REAL *middle = f->middles + at * D;
    back_through_given(
        s, l, t, 1, d_inner, s->w->inner + l, middle, d_sum, f->d_middles + at * D
    );
}

/* Gradients of the query, into dq, and of the scores, for the head h of row b. */
static void back_read_slots(Share *s, long l, long t, long h, long b, const REAL *d_o, REAL *dq) {
    const Loop *f = s->f;
    long K = f->width, N = f->kv_stride, R = f->n_heads * f->batch, r = h * f->batch + b;
    long at = (f->groups > 1 ? l : 0) * R + r;
    Step step = s->steps[t];
    const REAL *p = f->probabilities + step.at + (l * R + r) * step.n;
    const unsigned char *kept = kept_weights_at(f, t, l, r, step.n);
    REAL *ds = f->d_scores + step.at + (l * R + r) * step.n, sum = 0;
    memset(ds, 0, step.n * sizeof(REAL));
    add_rows(ds, d_o, f->kv + (f->groups * R + at) * K * N + step.low, N, K, step.n);
    if (kept) drop(ds, kept, f->weights_scale, step.n);
    for (long j = 0; j < step.n; j++) sum += p[j] * ds[j];
    for (long j = 0; j < step.n; j++) ds[j] = p[j] * (ds[j] - sum);
    add_dots(dq, ds, f->kv + at * K * N + step.low, N, K, step.n);
    long table = ((l * f->n_heads + h) * K + 1) * f->span - step.n;
    add_dots(dq, ds, f->position_keys + table, f->span, K, step.n);
}

static void back_attention(Share *s, long l, long t, REAL *below) {
    const Loop *f = s->f;
    long D = f->d_model, H = f->n_heads, K = f->width, HK = H * K, n = s->rows, at = rows_at(s, l, t);
    REAL *d_query = f->d_query + at * HK, *d_added = f->d_attention + at * D;
    const REAL *d_sum = back_through_sum(s, l, t, 0, f->d_middles + at * D, d_added);
    memset(d_query, 0, n * HK * sizeof(REAL));
    if (!s->steps[t].n) {
        memcpy(below, d_sum, n * D * sizeof(REAL));
        return;
    }
    product(d_added, D, s->w->output + l, n, NULL, NULL, s->q, HK, 0);
    for (long h = 0; h < H; h++)
        for (long i = 0; i < n; i++) {
            REAL has_memory = t == 0 && f->has_memory ? f->has_memory[s->first + i] : 1;
            REAL *d_o = s->d_read + ((t % BLOCK * f->n_layers + l) * H * n + h * n + i) * K;
            for (long k = 0; k < K; k++) d_o[k] = has_memory * s->q[i * HK + h * K + k];
            back_read_slots(s, l, t, h, s->first + i, d_o, d_query + i * HK + h * K);
        }
    const REAL *x = f->states + at * D;
    back_through_given(s, l, t, 0, d_query, s->w->query + l, x, d_sum, below);
}

/* What step t adds to the gradients of the keys and values in the slots from .. to, for a row's head h. */
static void add_to_slots(Share *s, long t, long h, long i, long from, long to) {
    const Loop *f = s->f;
    long K = f->width, N = f->kv_stride, R = f->n_heads * f->batch, r = h * f->batch + s->first + i;
    Step step = s->steps[t];
    for (long l = 0; l < f->n_layers; l++) {
        long at = (f->groups > 1 ? l : 0) * R + r, slot = from - step.low;
        long weights = step.at + (l * R + r) * step.n + slot;
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
static void keys_and_values(Share *s, long t) {
    const Loop *f = s->f;
    long first = t / BLOCK * BLOCK, border = f->n_old + first;
    long last = first + BLOCK < f->steps ? first + BLOCK : f->steps;
    for (long h = 0; h < f->n_heads; h++)
        for (long i = 0; i < s->rows; i++) {
            Step step = s->steps[t];
            long from = border > step.low ? border : step.low, to = step.low + step.n;
            if (from < to) add_to_slots(s, t, h, i, from, to);
            for (long u = first; t == first && u < last; u++)
                if (s->steps[u].low < border) add_to_slots(s, u, h, i, s->steps[u].low, border);
        }
}

int backward(const Loop *f, const Weights *w, long first, long end) {
    Share s;
    long D = f->d_model, L = f->n_layers;
    int can = open_share(&s, f, w, first, end, 1);
    for (long t = f->steps - 1; can && t >= 0; t--) {
        const REAL *dm = back_memory_vector(&s, t), *d_out = f->d_out + rows_at(&s, 0, t) * D;
        REAL *d_state = f->d_states + rows_at(&s, L - 1, t) * D;
        for (long i = 0; i < s.rows * D; i++) d_state[i] = d_out[i] + f->mix[L] * dm[i];
        for (long l = L - 1; l >= 0; l--) {
            REAL *below =
                l ? f->d_states + rows_at(&s, l - 1, t) * D : f->d_first + rows_at(&s, 0, t) * D;
            back_feed_forward(&s, l, t);
            back_attention(&s, l, t, below);
            for (long i = 0; i < s.rows * D; i++) below[i] += f->mix[l] * dm[i];
        }
        keys_and_values(&s, t);
    }
    return close_share(&s, can);
}

/* After backward of all rows: the position tables of the pairs of a layer and a head, first to end. */
int position_gradients(const Loop *f, long first, long end) {
    long B = f->batch, H = f->n_heads, K = f->width, L = f->n_layers, R = H * B;
    Step *steps = steps_of(f);
    for (long lh = first; steps && lh < end; lh++)
        for (long t = f->steps - 1; t >= 0; t--) {
            long n = steps[t].n, r = lh % H * B, l = lh / H;
            REAL *d_keys = f->d_position_keys + (lh * K + 1) * f->span - n;
            REAL *d_scores = f->d_position_scores + (lh + 1) * f->span - n;
            for (long b = 0; b < B; b++) {
                const REAL *q = f->queries + ((t * L + l) * R + r + b) * K;
                const REAL *ds = f->d_scores + steps[t].at + (l * R + r + b) * n;
                outer_product(d_keys, q, ds, f->span, K, n);
                for (long j = 0; j < n; j++) d_scores[j] += ds[j];
            }
        }
    int can = steps != NULL;
    free(steps);
    return can;
}
