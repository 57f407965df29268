/* The Feedback Transformer's loop over tokens, forward and backward, for one thread.

   It fills the same buffers as the loops in steps.py, in the same layouts, except that keys, values and
   their gradients are width first, [2, G, H * B, K, N], so that the scores of many slots are computed at
   once. Functions that allocate return null or 0 if out of memory. docs/annotated/feedback_backward.md derives it. */

#include "loop.h"

typedef struct {
    long steps, batch, d_model, n_heads, width, d_ff, n_layers, groups, n_old, span, gelu;
    long kv_stride; /* between the numbers of a slot; forward may use part of a longer buffer */
    long norms_memory;
    double eps;
    /* Folded weights. All tensors are contiguous. */
    const REAL *query, *query_bias, *position_keys, *position_scores, *output, *inner, *inner_bias,
        *outer, *memory, *memory_bias, *mix;
    const REAL *additive_mask, *has_memory; /* may be null */
    REAL *states, *middles, *queries, *attended, *activated, *before, *vectors, *kv, *moments,
        *memory_moments, *probabilities;
    const REAL *d_out, *d_vectors;
    REAL *d_states, *d_middles, *d_inner, *d_query, *d_first, *d_mixed, *d_projected, *d_kv,
        *d_position_keys, *d_position_scores;
} Loop;

/* ----- Attention of one row's head; what slots hold is [width, n_slots], stride apart */

/* m[k, j] += a[k] w[j] */
static void outer_product(
    REAL *restrict m, const REAL *restrict a, const REAL *restrict w, long stride, long width,
    long n
) {
    for (long k = 0; k < width; k++)
        for (long j = 0; j < n; j++) m[k * stride + j] += a[k] * w[j];
}

/* ----- Norm and activation */

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

/* ----- What forward and backward share */

typedef struct {
    long low, n; /* the slots it attends to */
    REAL *p;     /* its attention weights, [L, H * B, n] */
} Step;

static Step *steps_of(const Loop *f) {
    Step *s = malloc((size_t)f->steps * sizeof(Step));
    REAL *p = f->probabilities;
    for (long t = 0; s && t < f->steps; t++) {
        long high = f->n_old + t, low = high > f->span ? high - f->span : 0;
        s[t] = (Step){low, high - low, p};
        p += f->n_layers * f->n_heads * f->batch * s[t].n;
    }
    return s;
}

#define LAYER_STEP(l, t) (((l) * f->steps + (t)) * f->batch)

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
static Weights *pack_all(const Loop *f, int transposed) {
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

Weights *prepare(const Loop *f) { return pack_all(f, 0); }

int forward(const Loop *f, const Weights *w) {
    long T = f->steps, B = f->batch, D = f->d_model, H = f->n_heads, K = f->width, F = f->d_ff;
    long L = f->n_layers, G = f->groups, N = f->kv_stride, HK = H * K, R = H * B;
    const Packed *query = w->query, *output = w->output, *inner = w->inner, *outer = w->outer;
    REAL *z = malloc((size_t)(B * (D + HK + 2 * G * HK)) * sizeof(REAL));
    REAL *q = z + B * D, *projected = q + B * HK;
    REAL *read = malloc((size_t)K * sizeof(REAL));
    Step *steps = steps_of(f);
    int can = z && read && steps;

    for (long t = 0; can && t < T; t++) {
        Step s = steps[t];
        for (long l = 0; l < L; l++) {
            const REAL *x = f->states + LAYER_STEP(l, t) * D;
            REAL *middle = f->middles + LAYER_STEP(l, t) * D;
            REAL *attended = f->attended + LAYER_STEP(l, t) * (HK + 1);
            REAL *activated = f->activated + LAYER_STEP(l, t) * (F + 1);
            REAL *mean = f->moments + 4 * LAYER_STEP(l, t);
            if (s.n) {
                normalise(x, z, mean, mean + B, B, D, f->eps);
                product(z, D, query + l, B, f->query_bias + l * HK, NULL, q, HK, 0);
                for (long r = 0; r < R; r++) {
                    long h = r / B, b = r % B, at = (G > 1 ? l : 0) * R + r;
                    const REAL *row = q + b * HK + h * K;
                    REAL *p = s.p + (l * R + r) * s.n;
                    memcpy(f->queries + ((t * L + l) * R + r) * K, row, K * sizeof(REAL));
                    memcpy(
                        p, f->position_scores + (l * H + h) * f->span + f->span - s.n,
                        s.n * sizeof(REAL)
                    );
                    add_rows(
                        p, row, f->position_keys + (l * H + h) * K * f->span + f->span - s.n,
                        f->span, K, s.n
                    );
                    add_rows(p, row, f->kv + at * K * N + s.low, N, K, s.n);
                    if (f->additive_mask)
                        for (long j = s.low; j < f->n_old; j++)
                            p[j - s.low] += f->additive_mask[b * f->n_old + j];
                    softmax(p, s.n);
                    memset(read, 0, K * sizeof(REAL));
                    add_dots(read, p, f->kv + (G * R + at) * K * N + s.low, N, K, s.n);
                    REAL has_memory = t == 0 && f->has_memory ? f->has_memory[b] : 1;
                    for (long k = 0; k < K; k++)
                        attended[b * (HK + 1) + h * K + k] = has_memory * read[k];
                }
                product(attended, HK + 1, output + l, B, NULL, x, middle, D, 0);
            } else {
                memcpy(middle, x, B * D * sizeof(REAL));
            }
            normalise(middle, z, mean + 2 * B, mean + 3 * B, B, D, f->eps);
            if (f->gelu) {
                REAL *before = f->before + LAYER_STEP(l, t) * F;
                product(z, D, inner + l, B, f->inner_bias + l * F, NULL, before, F, 0);
                for (long b = 0; b < B; b++) gelu(before + b * F, activated + b * (F + 1), F);
            } else {
                product(z, D, inner + l, B, f->inner_bias + l * F, NULL, activated, F + 1, 1);
            }
            product(
                activated, F + 1, outer + l, B, NULL, middle,
                f->states + LAYER_STEP(l + 1, t) * D, D, 0
            );
        }
        REAL *vector = f->vectors + t * B * D;
        memset(vector, 0, B * D * sizeof(REAL));
        for (long l = 0; l <= L; l++)
            for (long i = 0; i < B * D; i++)
                vector[i] += f->mix[l] * f->states[LAYER_STEP(l, t) * D + i];
        if (f->norms_memory) {
            REAL *moments = f->memory_moments + 2 * t * B;
            normalise(vector, z, moments, moments + B, B, D, f->eps);
            vector = z;
        }
        product(vector, D, &w->memory, B, f->memory_bias, NULL, projected, 2 * G * HK, 0);
        for (long b = 0; b < B; b++)
            for (long c = 0; c < 2 * G; c++)
                for (long h = 0; h < H; h++)
                    for (long k = 0; k < K; k++)
                        f->kv[((c * R + h * B + b) * K + k) * N + f->n_old + t] =
                            projected[b * 2 * G * HK + (c * H + h) * K + k];
    }

    free(z);
    free(read);
    free(steps);
    return can;
}

/* Steps whose contributions to earlier slots' gradients are added together, while those are cached. */
#define BLOCK 8

int backward(const Loop *f) {
    long T = f->steps, B = f->batch, D = f->d_model, H = f->n_heads, K = f->width, F = f->d_ff;
    long L = f->n_layers, G = f->groups, N = f->kv_stride, HK = H * K, R = H * B;
    Weights *w = pack_all(f, 1);
    if (!w) return 0;
    const Packed *query = w->query, *output = w->output, *inner = w->inner, *outer = w->outer;
    REAL *g = malloc((size_t)(B * (D + HK)) * sizeof(REAL)), *d_attended = g + B * D;
    /* Of the block's steps: gradients of the scores, and of what the heads read, [L, H * B, .]. */
    REAL *d_scores = malloc((size_t)(BLOCK * L * R * f->span) * sizeof(REAL));
    REAL *d_read = malloc((size_t)(BLOCK * L * R * K) * sizeof(REAL));
    Step *steps = steps_of(f);
    int can = g && d_scores && d_read && steps;

    for (long t = T - 1; can && t >= 0; t--) {
        Step s = steps[t];
        long first = t / BLOCK * BLOCK, place = t - first;
        REAL *ds_step = d_scores + place * L * R * f->span;
        REAL *do_step = d_read + place * L * R * K;

        /* The gradients that later tokens gave this one's keys and values reach its memory vector. */
        REAL *d_projected = f->d_projected + t * B * 2 * G * HK, *dm = f->d_mixed + t * B * D;
        for (long b = 0; b < B; b++)
            for (long c = 0; c < 2 * G; c++)
                for (long h = 0; h < H; h++)
                    for (long k = 0; k < K; k++)
                        d_projected[b * 2 * G * HK + (c * H + h) * K + k] =
                            f->d_kv[((c * R + h * B + b) * K + k) * N + f->n_old + t];
        const REAL *from_outside = f->d_vectors + t * B * D;
        if (f->norms_memory) {
            const REAL *moments = f->memory_moments + 2 * t * B;
            product(d_projected, 2 * G * HK, &w->memory, B, NULL, NULL, g, D, 0);
            back_through_norm(
                g, f->vectors + t * B * D, moments, moments + B, from_outside, dm, B, D
            );
        } else {
            product(d_projected, 2 * G * HK, &w->memory, B, NULL, from_outside, dm, D, 0);
        }
        REAL *d_state = f->d_states + LAYER_STEP(L - 1, t) * D;
        for (long i = 0; i < B * D; i++) d_state[i] = f->d_out[t * B * D + i] + f->mix[L] * dm[i];

        for (long l = L - 1; l >= 0; l--) {
            const REAL *x = f->states + LAYER_STEP(l, t) * D;
            const REAL *middle = f->middles + LAYER_STEP(l, t) * D;
            const REAL *mean = f->moments + 4 * LAYER_STEP(l, t);
            REAL *d_middle = f->d_middles + LAYER_STEP(l, t) * D;
            REAL *d_inner = f->d_inner + LAYER_STEP(l, t) * F;
            d_state = f->d_states + LAYER_STEP(l, t) * D;
            product(d_state, D, outer + l, B, NULL, NULL, d_inner, F, 0);
            if (f->gelu) {
                const REAL *before = f->before + LAYER_STEP(l, t) * F;
                for (long i = 0; i < B * F; i++) d_inner[i] *= gelu_slope(before[i]);
            } else {
                const REAL *activated = f->activated + LAYER_STEP(l, t) * (F + 1);
                for (long b = 0; b < B; b++)
                    for (long i = 0; i < F; i++)
                        d_inner[b * F + i] *= activated[b * (F + 1) + i] > 0;
            }
            product(d_inner, F, inner + l, B, NULL, NULL, g, D, 0);
            back_through_norm(g, middle, mean + 2 * B, mean + 3 * B, d_state, d_middle, B, D);

            REAL *below = l ? f->d_states + LAYER_STEP(l - 1, t) * D : f->d_first + t * B * D;
            REAL *d_query = f->d_query + LAYER_STEP(l, t) * HK;
            memset(d_query, 0, B * HK * sizeof(REAL));
            if (s.n) {
                product(d_middle, D, output + l, B, NULL, NULL, d_attended, HK, 0);
                for (long r = 0; r < R; r++) {
                    long h = r / B, b = r % B, at = (G > 1 ? l : 0) * R + r;
                    const REAL *p = s.p + (l * R + r) * s.n;
                    const REAL *q = f->queries + ((t * L + l) * R + r) * K;
                    REAL *ds = ds_step + (l * R + r) * f->span, *d_o = do_step + (l * R + r) * K;
                    REAL *dq = d_query + b * HK + h * K, sum = 0;
                    long position = (l * H + h) * f->span + f->span - s.n;
                    long table = (l * H + h) * K * f->span + f->span - s.n;
                    REAL has_memory = t == 0 && f->has_memory ? f->has_memory[b] : 1;
                    for (long k = 0; k < K; k++) d_o[k] = has_memory * d_attended[b * HK + h * K + k];
                    memset(ds, 0, s.n * sizeof(REAL));
                    add_rows(ds, d_o, f->kv + (G * R + at) * K * N + s.low, N, K, s.n);
                    for (long j = 0; j < s.n; j++) sum += p[j] * ds[j];
                    for (long j = 0; j < s.n; j++) ds[j] = p[j] * (ds[j] - sum);
                    add_dots(dq, ds, f->kv + at * K * N + s.low, N, K, s.n);
                    add_dots(dq, ds, f->position_keys + table, f->span, K, s.n);
                    outer_product(f->d_position_keys + table, q, ds, f->span, K, s.n);
                    for (long j = 0; j < s.n; j++) f->d_position_scores[position + j] += ds[j];
                }
                product(d_query, HK, query + l, B, NULL, NULL, g, D, 0);
                back_through_norm(g, x, mean, mean + B, d_middle, below, B, D);
                for (long i = 0; i < B * D; i++) below[i] += f->mix[l] * dm[i];
            } else {
                for (long i = 0; i < B * D; i++) below[i] = d_middle[i] + f->mix[l] * dm[i];
            }
        }

        /* This block's slots now, as the next steps need them; earlier slots at the end of the block. */
        for (long r = 0; r < R; r++)
            for (long u = place; u < (t == first ? BLOCK : place + 1) && first + u < T; u++) {
                Step e = steps[first + u];
                long border = f->n_old + first;
                for (long part = 0; part < 2; part++) {
                    /* part 0: this step's slots of the block; part 1: at the end, all earlier. */
                    long from = part ? e.low : (border > e.low ? border : e.low);
                    long to = part ? border : e.low + e.n;
                    if ((part ? t != first : u != place) || from >= to) continue;
                    for (long l = 0; l < L; l++) {
                        long at = (G > 1 ? l : 0) * R + r, row = (u * L + l) * R + r;
                        const REAL *q = f->queries + (((first + u) * L + l) * R + r) * K;
                        outer_product(
                            f->d_kv + at * K * N + from, q,
                            d_scores + row * f->span + from - e.low, N, K, to - from
                        );
                        outer_product(
                            f->d_kv + (G * R + at) * K * N + from, d_read + row * K,
                            e.p + (l * R + r) * e.n + from - e.low, N, K, to - from
                        );
                    }
                }
            }
    }

    release(w);
    free(g);
    free(d_scores);
    free(d_read);
    free(steps);
    return can;
}
