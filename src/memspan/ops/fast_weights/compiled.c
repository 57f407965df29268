/* The delta and the sum rule token by token, forward and backward, and single tokens through a stack;
   with a decay, the delta rule by chunks.

   A head's memory is W [features, values]. DPFP leaves a quarter of a token's features non-zero: only
   those rows of W are touched. README.md has the derivation. */

#include "stack.h"

/* [rows, heads, tokens, .] with any strides but the last, which is 1. */
typedef struct {
    REAL *data;
    int64_t row, head, token;
} View;

typedef struct {
    int64_t n_heads, share; /* heads of keys, and heads of values that each serves: 1 without a decay */
    int64_t steps, width, value_width, n_features;
    int64_t nu;         /* DPFP's rolls; 0: q and k are features already */
    int64_t normalises; /* whether features are divided by their sum plus epsilon */
    int64_t delta;      /* whether it is the delta rule */
    int64_t save_every; /* tokens between two saved memories */
    double epsilon;
    const unsigned char *starts; /* [rows, tokens]: the memory is emptied before these; may be null */
    View q, k, v, beta, log_decay, y, errors, d_q, d_k, d_v, d_beta, d_log_decay, d_y;
    const REAL *before, *d_after;
    REAL *after, *d_before; /* [rows, heads, features, values], as the two above */
    REAL *saved; /* the memory before each interval but the first, [rows, heads, intervals - 1, .] */
} Loop;

#define TOKEN(view, b, h, t) ((view).data + (b) * (view).row + (h) * (view).head + (t) * (view).token)

#include "chunks.h"

/* ----- Features */

/* The non-zero features of a key or query. */
typedef struct {
    int64_t n;
    REAL scale; /* one over their sum */
    int *index, *candidates;
    const REAL *value;
    REAL *own, *gradient, *products;
    REAL *extended; /* [x, -x, x], and its gradient */
} Features;

/* False if out of memory. Keys that are features already use all indices, in order. */
static int new_features(Features *f, int64_t width, int64_t n_features) {
    f->index = malloc((size_t)(n_features + 1 + width) * sizeof(int));
    f->own = malloc((size_t)(3 * (n_features + 1) + 6 * width) * sizeof(REAL));
    if (!f->index || !f->own) return 0;
    f->candidates = f->index + n_features + 1;
    f->value = f->own;
    f->gradient = f->own + n_features + 1;
    f->products = f->gradient + n_features + 1;
    f->extended = f->products + n_features + 1;
    for (int64_t m = 0; m < n_features; m++) f->index[m] = (int)m;
    return 1;
}

static void free_features(Features *f) {
    free(f->index);
    free(f->own);
}

/* With e = [x, -x], feature (i, j) is relu(e_j) relu(e_{j-i}). As e_{j+K} = -e_j, at most one of j and
   j + K is non-zero: K candidates per roll, not 2 K. */
static void find_features(
    Features *f, const REAL *restrict x, int64_t width, int64_t nu, int64_t normalises, REAL epsilon
) {
    if (nu == 0) {
        f->n = width;
        f->value = x;
        return;
    }
    REAL *restrict e = f->extended, *restrict products = f->products, sum = 0;
    int *restrict candidates = f->candidates;
    const REAL *now = e + 2 * width;
    for (int64_t j = 0; j < width; j++) {
        e[j] = e[2 * width + j] = x[j], e[width + j] = -x[j];
        candidates[j] = (int)j + (x[j] < 0 ? (int)width : 0);
    }
    for (int64_t i = 1; i <= nu; i++)
        for (int64_t j = 0; j < width; j++) {
            REAL p = now[j] * now[j - i];
            products[(i - 1) * width + j] = p;
            /* Not p > 0, which would drop NaN. */
            sum += p <= 0 ? 0 : p;
        }
    REAL *value = f->own;
    if (sum != sum) {
        /* A NaN coordinate has no sign: any feature may be non-zero. */
        f->n = 2 * width * nu, f->scale = sum;
        for (int64_t m = 0; m < f->n; m++) f->index[m] = (int)m, value[m] = sum;
        return;
    }
    f->scale = normalises ? 1 / (sum + epsilon) : 1;
    int64_t n = 0;
    for (int64_t i = 0; i < nu; i++)
        for (int64_t j = 0; j < width; j++) {
            REAL p = products[i * width + j];
            value[n] = p * f->scale;
            f->index[n] = (int)(2 * width * i) + candidates[j];
            n += p > 0;
        }
    f->n = n;
}

/* The gradient of x from those of its features. */
INLINE void back_to_key(Features *f, REAL *d_x, int64_t width, int64_t nu, int64_t normalises) {
    if (nu == 0) {
        memcpy(d_x, f->gradient, width * sizeof(REAL));
        return;
    }
    if (normalises) {
        REAL mean = 0;
        for (int64_t m = 0; m < f->n; m++) mean += f->gradient[m] * f->value[m];
        for (int64_t m = 0; m < f->n; m++) f->gradient[m] = (f->gradient[m] - mean) * f->scale;
    }
    const REAL *now = f->extended + 2 * width;
    REAL *d_extended = f->extended + 3 * width, *d_now = d_extended + 2 * width;
    memset(d_extended, 0, 3 * width * sizeof(REAL));
    for (int64_t m = 0, i = 0; m < f->n; m++) {
        while (f->index[m] >= 2 * width * i) i++;
        int64_t j = f->index[m] - 2 * width * (i - 1);
        j -= j >= width ? width : 0;
        d_now[j] += f->gradient[m] * now[j - i];
        d_now[j - i] += f->gradient[m] * now[j];
    }
    for (int64_t j = 0; j < width; j++)
        d_x[j] = d_extended[j] - d_extended[width + j] + d_now[j];
}

/* ----- Rows of a memory */

/* out = sum_m value[m] w[index[m], :] */
INLINE void read_rows(REAL *restrict out, const REAL *restrict w, int64_t size, const Features *f) {
    int64_t c = 0;
    for (; c + 4 * WIDE <= size; c += 4 * WIDE) {
        Vector s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        for (int64_t m = 0; m < f->n; m++) {
            const Vector *r = (const Vector *)(w + f->index[m] * size + c);
            REAL x = f->value[m];
            s0 += x * r[0], s1 += x * r[1], s2 += x * r[2], s3 += x * r[3];
        }
        Vector *o = (Vector *)(out + c);
        o[0] = s0, o[1] = s1, o[2] = s2, o[3] = s3;
    }
    for (; c + WIDE <= size; c += WIDE) {
        Vector s = {0};
        for (int64_t m = 0; m < f->n; m++)
            s += f->value[m] * *(const Vector *)(w + f->index[m] * size + c);
        *(Vector *)(out + c) = s;
    }
    for (; c < size; c++) {
        REAL s = 0;
        for (int64_t m = 0; m < f->n; m++) s += f->value[m] * w[f->index[m] * size + c];
        out[c] = s;
    }
}

/* w[index[m], :] += value[m] u; the old rows are copied unless old is null. */
INLINE void write_rows(
    REAL *restrict w, REAL *restrict old, const REAL *restrict u, int64_t size, const Features *f
) {
    for (int64_t m = 0; m < f->n; m++) {
        REAL *r = w + f->index[m] * size, x = f->value[m];
        for (int64_t c = 0; c < size; c++) {
            if (old) old[m * size + c] = r[c];
            r[c] += x * u[c];
        }
    }
}

/* ----- Segments */

/* Tokens prefetched: a head's tokens lie too far apart for the processor to predict. */
#define AHEAD 4

INLINE void fetch(const View *view, int64_t b, int64_t h, int64_t t, int64_t size) {
    const REAL *from = TOKEN(*view, b, h, t);
    for (int64_t c = 0; c < size; c += 64 / (int64_t)sizeof(REAL)) __builtin_prefetch(from + c);
}

/* Gradients of a query's features and of the memory, from that of what it read. */
INLINE void back_from_read(
    Features *f, const REAL *w, REAL *d_w, const REAL *restrict d_y, const int64_t V
) {
    REAL *restrict gradient = f->gradient;
    for (int64_t m = 0; m < f->n; m++) {
        const REAL *restrict row = w + f->index[m] * V;
        REAL *restrict d_row = d_w + f->index[m] * V, x = f->value[m], s = 0;
        for (int64_t c = 0; c < V; c++) {
            s += row[c] * d_y[c];
            d_row[c] += x * d_y[c];
        }
        gradient[m] = s;
    }
}

/* The same for a key, which wrote u and, with the delta rule, read (gradient -d_v; null for the sum rule).
   Restores the old rows. */
INLINE void back_from_change(
    Features *f, REAL *w, const REAL *restrict old, REAL *d_w, const REAL *restrict u,
    const REAL *restrict d_v, const int64_t V
) {
    REAL *restrict gradient = f->gradient;
    for (int64_t m = 0; m < f->n; m++, old += V) {
        REAL *restrict row = w + f->index[m] * V, *restrict d_row = d_w + f->index[m] * V;
        REAL x = f->value[m], s = 0;
        for (int64_t c = 0; c < V; c++) {
            s += d_v ? d_row[c] * u[c] - old[c] * d_v[c] : d_row[c] * u[c];
            if (d_v) d_row[c] -= x * d_v[c];
            row[c] = old[c];
        }
        gradient[m] = s;
    }
}

/* What token t adds under its key: computed into u for the delta rule, else the value itself. */
INLINE const REAL *change_of(
    const Loop *f, int64_t b, int64_t h, int64_t t, REAL *restrict u, const int64_t V
) {
    if (!f->delta) return TOKEN(f->v, b, h, t);
    REAL beta = *TOKEN(f->beta, b, h, t);
    const REAL *errors = TOKEN(f->errors, b, h, t);
    for (int64_t c = 0; c < V; c++) u[c] = beta * errors[c];
    return u;
}

/* Whether the memory is emptied before token t of row b. */
INLINE int starts_at(const Loop *f, int64_t b, int64_t t) {
    return f->starts && f->starts[b * f->steps + t];
}

/* Heads first .. end - 1 of all rows; false if out of memory. */
INLINE int forward_of(const Loop *f, int64_t first, int64_t end, const int64_t V) {
    int64_t K = f->width, F = f->n_features, intervals = (f->steps - 1) / f->save_every;
    Features key = {0}, query = {0};
    REAL *u = malloc((size_t)V * sizeof(REAL));
    int can = new_features(&key, K, F) && new_features(&query, K, F) && u;
    for (int64_t r = first; can && r < end; r++) {
        int64_t b = r / f->n_heads, h = r % f->n_heads;
        REAL *w = f->after + r * F * V;
        memcpy(w, f->before + r * F * V, F * V * sizeof(REAL));
        for (int64_t t = 0; t < f->steps; t++) {
            fetch(&f->k, b, h, t + AHEAD, K);
            fetch(&f->q, b, h, t + AHEAD, K);
            fetch(&f->v, b, h, t + AHEAD, V);
            if (f->saved && t && t % f->save_every == 0)
                memcpy(
                    f->saved + (r * intervals + t / f->save_every - 1) * F * V, w, F * V * sizeof(REAL)
                );
            if (starts_at(f, b, t)) memset(w, 0, F * V * sizeof(REAL));
            find_features(&key, TOKEN(f->k, b, h, t), K, f->nu, f->normalises, f->epsilon);
            find_features(&query, TOKEN(f->q, b, h, t), K, f->nu, f->normalises, f->epsilon);
            if (f->delta) {
                const REAL *v = TOKEN(f->v, b, h, t);
                REAL *errors = TOKEN(f->errors, b, h, t);
                read_rows(u, w, V, &key);
                for (int64_t c = 0; c < V; c++) errors[c] = v[c] - u[c];
            }
            write_rows(w, NULL, change_of(f, b, h, t, u, V), V, &key);
            read_rows(TOKEN(f->y, b, h, t), w, V, &query);
        }
    }
    free(u);
    free_features(&key);
    free_features(&query);
    return can;
}

/* Intervals from last to first, cut where the memory is emptied. Each is read forward again from the memory
   before it, copying the rows that a token overwrites; going back these are restored. Subtracting what was
   written instead would not bring back what rounding took, which is everything where a value is large. */
INLINE int backward_of(const Loop *f, int64_t first, int64_t end, const int64_t V) {
    int64_t K = f->width, F = f->n_features, intervals = (f->steps - 1) / f->save_every;
    int64_t longest = f->steps < f->save_every ? f->steps : f->save_every;
    Features key = {0}, query = {0};
    REAL *w = malloc((size_t)(F * V) * sizeof(REAL)), *u = malloc((size_t)V * sizeof(REAL));
    REAL *d_u = malloc((size_t)V * sizeof(REAL));
    /* Untouched pages take no memory: with DPFP that is at least half of them. */
    REAL *overwritten = malloc((size_t)(longest * F * V) * sizeof(REAL));
    int can = new_features(&key, K, F) && new_features(&query, K, F) && w && u && d_u && overwritten;
    for (int64_t r = first; can && r < end; r++) {
        int64_t b = r / f->n_heads, h = r % f->n_heads;
        /* The gradient of the memory after the current token. */
        REAL *d_w = f->d_before + r * F * V;
        memcpy(d_w, f->d_after + r * F * V, F * V * sizeof(REAL));
        for (int64_t stop = f->steps, start; stop > 0; stop = start) {
            int64_t s = (stop - 1) / f->save_every;
            for (start = stop - 1; start > s * f->save_every && !starts_at(f, b, start);) start--;
            const REAL *saved = s ? f->saved + (r * intervals + s - 1) * F * V : f->before + r * F * V;
            if (starts_at(f, b, start)) memset(w, 0, F * V * sizeof(REAL));
            else memcpy(w, saved, F * V * sizeof(REAL));
            REAL *old = overwritten;
            for (int64_t t = start; t < stop; t++) {
                fetch(&f->k, b, h, t + AHEAD, K);
                fetch(f->delta ? &f->errors : &f->v, b, h, t + AHEAD, V);
                find_features(&key, TOKEN(f->k, b, h, t), K, f->nu, f->normalises, f->epsilon);
                write_rows(w, old, change_of(f, b, h, t, u, V), V, &key);
                old += key.n * V;
            }
            for (int64_t t = stop - 1; t >= start; t--) {
                fetch(&f->q, b, h, t - AHEAD, K);
                fetch(&f->d_y, b, h, t - AHEAD, V);
                find_features(&key, TOKEN(f->k, b, h, t), K, f->nu, f->normalises, f->epsilon);
                find_features(&query, TOKEN(f->q, b, h, t), K, f->nu, f->normalises, f->epsilon);
                back_from_read(&query, w, d_w, TOKEN(f->d_y, b, h, t), V);
                back_to_key(&query, TOKEN(f->d_q, b, h, t), K, f->nu, f->normalises);

                old -= key.n * V;
                const REAL *change = change_of(f, b, h, t, u, V);
                REAL *d_v = TOKEN(f->d_v, b, h, t);
                if (!f->delta) {
                    read_rows(d_v, d_w, V, &key);
                    back_from_change(&key, w, old, d_w, change, NULL, V);
                } else {
                    REAL beta = *TOKEN(f->beta, b, h, t);
                    read_rows(d_u, d_w, V, &key);
                    *TOKEN(f->d_beta, b, h, t) = dot(d_u, TOKEN(f->errors, b, h, t), V);
                    for (int64_t c = 0; c < V; c++) d_v[c] = beta * d_u[c];
                    back_from_change(&key, w, old, d_w, change, d_v, V);
                }
                back_to_key(&key, TOKEN(f->d_k, b, h, t), K, f->nu, f->normalises);
            }
            if (starts_at(f, b, start)) memset(d_w, 0, F * V * sizeof(REAL));
        }
    }
    free(w);
    free(u);
    free(d_u);
    free(overwritten);
    free_features(&key);
    free_features(&query);
    return can;
}

/* A width known at compile time halves the time. */
#define BY_WIDTH(run)                                           \
    switch (f->value_width) {                                   \
        case 16: return run(f, first, end, 16);                 \
        case 32: return run(f, first, end, 32);                 \
        case 64: return run(f, first, end, 64);                 \
        default: return run(f, first, end, f->value_width);     \
    }

#include "token.h"

/* Weights in bfloat16 are read by steps alone. */
#ifndef BFLOAT16
EXPORT int forward(const Loop *f, int64_t first, int64_t end) {
    if (f->log_decay.data) {
        int few = f->steps < FEW && f->steps <= f->save_every;
        return few ? forward_tokens(f, first, end) : forward_chunks(f, first, end);
    }
    BY_WIDTH(forward_of)
}

EXPORT int backward(const Loop *f, int64_t first, int64_t end) {
    if (f->log_decay.data) return backward_chunks(f, first, end);
    BY_WIDTH(backward_of)
}
#endif

/* ----- One token of every row through all layers, without gradients */

/* Projections are queries, keys, values, beta's logits: [3 H K + H, D]. */
typedef struct {
    Stack stack;
    int64_t nu, normalises, delta;
    double epsilon;
    REAL *const *memories; /* per layer [B, H, F, V], written in place */
} Step;

/* Whether the output is finite; -1 if out of memory. */
EXPORT int step(const Step *s, const Matrices *matrices) {
    const Stack *stack = &s->stack;
    int64_t B = stack->batch, D = stack->d_model, H = stack->n_heads, K = stack->width, I = H * K;
    int64_t P = stack->d_projected, F = 2 * K * s->nu;
    Scratch t = new_scratch(stack);
    Features key = {0}, query = {0};
    REAL *u = malloc((size_t)K * sizeof(REAL)), sum = 0;
    int can = new_features(&key, K, F) && new_features(&query, K, F) && t.z && u;
    for (int64_t l = 0; can && l < stack->n_layers; l++) {
        project(stack, matrices, &t, l);
        for (int64_t r = 0; r < B * H; r++) {
            int64_t b = r / H, h = r % H;
            const REAL *q = t.inside + b * P + h * K, *v = q + 2 * I;
            REAL *w = s->memories[l] + r * F * K;
            find_features(&key, q + I, K, s->nu, s->normalises, s->epsilon);
            find_features(&query, q, K, s->nu, s->normalises, s->epsilon);
            if (s->delta) {
                REAL beta = 1 / (1 + exp(-t.inside[b * P + 3 * I + h]));
                read_rows(u, w, K, &key);
                for (int64_t c = 0; c < K; c++) u[c] = beta * (v[c] - u[c]);
                v = u;
            }
            write_rows(w, NULL, v, K, &key);
            read_rows(t.attended + b * I + h * K, w, K, &query);
        }
        after_attention(stack, matrices, &t, l);
    }
    if (can) final_norm(stack, &t);
    for (int64_t i = 0; can && i < B * D; i++) sum += stack->x[i];
    free(t.z);
    free(u);
    free_features(&key);
    free_features(&query);
    return can ? isfinite(sum) != 0 : -1;
}
