/* The delta rule with a decay, by chunks of tokens, for compiled.c. README.md has the derivation.

   A chunk's tokens stand side by side in kT and qT [width, TOKENS], zero beyond its end: products then run
   along tokens or along values, never along a key. Values [tokens, stride] are padded to whole vectors. */

#include "vectors.h"

#ifdef __AVX512F__
#define TALL 8
#else
#define TALL 6
#endif
#define TOKENS 32

/* ----- Products */

/* A matrix whose element (i, j) is at[i * row + j * column]. */
typedef struct {
    const REAL *at;
    int64_t row, column;
} Matrix;

INLINE void block(
    REAL *c, const REAL *kept, int64_t stride, Matrix a, const REAL *b, int64_t b_stride, int64_t depth,
    REAL keep, REAL sign, const int64_t rows, const int64_t vectors
) {
    Lanes s[8][4] = {0};
    for (int64_t k = 0; k < depth; k++) {
        const Lanes *w = (const Lanes *)(b + k * b_stride);
        for (int64_t r = 0; r < rows; r++) {
            REAL x = a.at[r * a.row + k * a.column];
            for (int64_t u = 0; u < vectors; u++) s[r][u] += x * w[u];
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t u = 0; u < vectors; u++) {
            Lanes *out = (Lanes *)(c + r * stride) + u, x = sign * s[r][u];
            if (kept) x += keep * ((const Lanes *)(kept + r * stride))[u];
            *out = x;
        }
}

/* c = keep kept + sign a b, the first term unless null: a [m, depth], b [depth, n], c and kept [m, n], rows
   of the last three whole vectors. */
static void multiply(
    REAL *c, const REAL *kept, int64_t stride, REAL keep, REAL sign, Matrix a, const REAL *b,
    int64_t b_stride, int64_t m, int64_t n, int64_t depth
) {
    for (int64_t j = 0, wide; j < n; j += wide * LANES) {
        wide = n - j > 3 * LANES && m < 8 ? 4 : n - j > LANES ? 2 : 1;
        for (int64_t i = 0, rows, left; i < m; i += rows) {
            REAL *to = c + i * stride + j;
            const REAL *old = kept ? kept + i * stride + j : NULL;
            Matrix from = {a.at + i * a.row, a.row, a.column};
            left = m - i;
            /* Eight rows left are twice four. */
            rows = wide < 4 && left >= TALL && (TALL == 8 || left != 8) ? TALL : left >= 4 ? 4 : 1;
#define BLOCK(r, w) \
    if (rows == r && wide == w) block(to, old, stride, from, b + j, b_stride, depth, keep, sign, r, w)
            BLOCK(TALL, 2);
            BLOCK(TALL, 1);
            BLOCK(4, 4);
            BLOCK(4, 2);
            BLOCK(4, 1);
            BLOCK(1, 4);
            BLOCK(1, 2);
            BLOCK(1, 1);
#undef BLOCK
        }
    }
}

/* c [n, n] = sign a b up to and on the diagonal; what is above it is left as it may be. */
static void multiply_below(REAL *c, REAL sign, Matrix a, const REAL *b, int64_t n, int64_t depth) {
    for (int64_t first = 0; first < n; first += LANES) {
        int64_t end = first + LANES < n ? first + LANES : n;
        Matrix from = {a.at + first * a.row, a.row, a.column};
        multiply(c + first * TOKENS, NULL, TOKENS, 0, sign, from, b, TOKENS, end - first, end, depth);
    }
}

/* c = kept + a b, the first term unless null: a [n, n] is zero above its diagonal or, if `upper`, below. */
static void multiply_triangle(
    REAL *c, const REAL *kept, int64_t stride, Matrix a, int upper, const REAL *b, int64_t n, int64_t columns
) {
    for (int64_t i = 0, rows; i < n; i += rows) {
        rows = n - i < 8 ? n - i : 8;
        int64_t first = upper ? i : 0, end = upper ? n : i + rows;
        Matrix from = {a.at + i * a.row + first * a.column, a.row, a.column};
        const REAL *old = kept ? kept + i * stride : NULL;
        multiply(
            c + i * stride, old, stride, 1, 1, from, b + first * stride, stride, rows, columns, end - first
        );
    }
}

/* 0, 1, 2, ... In memory, as the compiler would otherwise put it together for every use. */
static Indices lane;
__attribute__((constructor)) static void fill_lane(void) {
    for (int64_t e = 0; e < LANES; e++) lane[e] = e;
}

/* Columns up to the last, zero beyond, of a vector from column `at` on. */
INLINE Lanes up_to(int last, Lanes x, int at) { return (Lanes)((Indices)x & (lane + at <= last)); }

/* out[c, t] = x[t, c], zero from t = n to the end of a vector. */
static void side_by_side(REAL *out, const REAL *x, int64_t stride, int64_t n, int64_t width) {
    transpose(out, TOKENS, x, stride, n, width);
    for (int64_t c = 0; n % LANES && c < width; c++)
        for (int64_t t = n; t % LANES; t++) out[c * TOKENS + t] = 0;
}

/* ----- A chunk */

/* Of one head of keys, and the values that it serves. */
typedef struct {
    int64_t n, K, V, stride; /* tokens; widths; V rounded up to whole vectors */
    REAL *kT, *qT, *gram, *scores; /* gram and scores [TOKENS, TOKENS]: k k^T and q k^T */
    /* Of one head of values, with the decay from token j to token i: below the diagonal, and P on it too. */
    REAL *between, *A, *P;
    REAL since[TOKENS], until[TOKENS], beta[TOKENS], whole;
    REAL *z, *u, *y; /* errors, what is written, what is read */
    REAL *padded; /* errors, where a row is not whole vectors; else z is where they are saved */
    /* For backward. */
    REAL *d_kT, *d_qT, *part, *d_gram, *d_scores, *d_A, *d_P, *zT, *uT, *yT, *square;
} Chunk;

static REAL *new_chunk(Chunk *c, int64_t K, int64_t V) {
    int64_t stride = (V + LANES - 1) / LANES * LANES, squares = TOKENS * TOKENS, keys = K * TOKENS;
    int64_t values = TOKENS * stride;
    REAL *all = malloc((size_t)(10 * squares + 5 * keys + 6 * values) * sizeof(REAL)), *at = all;
    c->K = K, c->V = V, c->stride = stride;
    REAL **parts[] = {&c->gram, &c->scores, &c->between, &c->A, &c->P, &c->d_gram, &c->d_scores,
                      &c->d_A, &c->d_P, &c->square, &c->kT, &c->qT, &c->d_kT, &c->d_qT, &c->part,
                      &c->padded, &c->u, &c->y, &c->zT, &c->uT, &c->yT};
    for (int64_t i = 0; i < 21; i++) {
        *parts[i] = at;
        at += i < 10 ? squares : i < 15 ? keys : values;
    }
    return all;
}

/* A chunk ends where the memory is saved, too. */
static int64_t tokens_from(const Loop *f, int64_t start) {
    int64_t n = f->save_every - start % f->save_every, left = f->steps - start;
    n = n < TOKENS ? n : TOKENS;
    return n < left ? n : left;
}

/* Keys and queries of the tokens from start, and their products. */
static void load_keys(Chunk *c, const Loop *f, int64_t b, int64_t h, int64_t start) {
    int64_t n = c->n = tokens_from(f, start);
    side_by_side(c->kT, TOKEN(f->k, b, h, start), f->k.token, n, c->K);
    side_by_side(c->qT, TOKEN(f->q, b, h, start), f->q.token, n, c->K);
    Matrix k = {c->kT, 1, TOKENS}, q = {c->qT, 1, TOKENS};
    multiply_below(c->gram, 1, k, c->kT, n, c->K);
    multiply_below(c->scores, 1, q, c->kT, n, c->K);
}

/* Products of just the decays between: a quotient of products from the chunk's start would lose what is
   small beside a strong decay further back, or divide by 0. */
static void load_strengths(Chunk *c, const Loop *f, int64_t b, int64_t h, int64_t start) {
    REAL since = 1;
    for (int64_t i = 0; i < c->n; i++) {
        REAL decay = exp(*TOKEN(f->log_decay, b, h, start + i)), *row = c->between + i * TOKENS;
        for (int64_t j = 0; j < i; j++) row[j] = decay * row[j - TOKENS];
        for (int64_t j = i; j < TOKENS; j++) row[j] = j == i;
        c->since[i] = since *= decay;
        c->beta[i] = *TOKEN(f->beta, b, h, start + i);
    }
    for (int64_t j = 0; j < c->n; j++) c->until[j] = c->between[(c->n - 1) * TOKENS + j];
    c->whole = since;
}

static void decay_products(Chunk *c) {
    for (int64_t i = 0; i < c->n; i++)
        for (int64_t j = 0, at = i * TOKENS; j < TOKENS; j += LANES, at += LANES) {
            Lanes between = *(Lanes *)(c->between + at);
            *(Lanes *)(c->A + at) = up_to(i - 1, between * *(Lanes *)(c->gram + at), j);
            *(Lanes *)(c->P + at) = up_to(i, between * *(Lanes *)(c->scores + at), j);
        }
}

/* x[t, :] *= by[t] */
INLINE void scale(REAL *restrict x, const REAL *by, const Chunk *c) {
    for (int64_t t = 0; t < c->n; t++)
        for (int64_t j = 0; j < c->stride; j++) x[t * c->stride + j] *= by[t];
}

static void load_values(REAL *to, const Chunk *c, const View *from, int64_t b, int64_t h, int64_t start) {
    for (int64_t t = 0; t < c->n; t++) {
        memcpy(to + t * c->stride, TOKEN(*from, b, h, start + t), c->V * sizeof(REAL));
        for (int64_t j = c->V; j < c->stride; j++) to[t * c->stride + j] = 0;
    }
}

static void store_values(
    const REAL *x, const Chunk *c, const View *to, int64_t b, int64_t h, int64_t start
) {
    for (int64_t t = 0; t < c->n; t++)
        memcpy(TOKEN(*to, b, h, start + t), x + t * c->stride, c->V * sizeof(REAL));
}

/* Saved errors of a head lie together, [tokens, V]. */
static REAL *errors_of(const Chunk *c, const Loop *f, int64_t b, int64_t head, int64_t start) {
    return c->stride == c->V ? TOKEN(f->errors, b, head, start) : c->padded;
}

/* Rows of V numbers of a memory, padded with zeros. */
static void copy_rows(
    REAL *to, int64_t to_stride, const REAL *from, int64_t from_stride, int64_t K, int64_t V
) {
    for (int64_t i = 0; i < K; i++) {
        memcpy(to + i * to_stride, from + i * from_stride, V * sizeof(REAL));
        if (to_stride > V) memset(to + i * to_stride + V, 0, (to_stride - V) * sizeof(REAL));
    }
}

/* Whether a memory holds nothing, as at the start of a text: products with it are left out. */
static int is_empty(const REAL *s, int64_t K, int64_t V) {
    for (int64_t i = 0; i < K; i++, s += V) {
        int any = 0;
        for (int64_t j = 0; j < V; j++) any |= s[j] != 0;
        if (any) return 0;
    }
    return 1;
}

/* z = v - since k S - A u, where u = beta z: eight tokens at a time, from the first to the last. */
static void solve(Chunk *c) {
    int64_t w = c->stride;
    for (int64_t first = 0; first < c->n; first += 8) {
        int64_t end = first + 8 < c->n ? first + 8 : c->n;
        Matrix a = {c->A + first * TOKENS, TOKENS, 1};
        multiply(c->z + first * w, c->z + first * w, w, 1, -1, a, c->u, w, end - first, c->V, first);
        for (int64_t i = first; i < end; i++) {
            REAL *restrict z = c->z + i * w, *restrict u = c->u + i * w;
            for (int64_t j = first; j < i; j++)
                for (int64_t d = 0; d < w; d++) z[d] -= c->A[i * TOKENS + j] * c->u[j * w + d];
            for (int64_t d = 0; d < w; d++) u[d] = c->beta[i] * z[d];
        }
    }
}

/* to = whole S + k^T until u, the first term unless null; u is changed. */
static void write(Chunk *c, REAL *to, const REAL *s) {
    Matrix k = {c->kT, TOKENS, 1};
    scale(c->u, c->until, c);
    multiply(to, s, c->stride, c->whole, 1, k, c->u, c->stride, c->K, c->V, c->n);
}

/* Heads of keys first .. end - 1 of all rows; false if out of memory. A memory whose rows are whole vectors
   is worked on where it lies. */
static int forward_chunks(const Loop *f, int64_t first, int64_t end) {
    int64_t K = f->n_features, V = f->value_width, intervals = (f->steps - 1) / f->save_every;
    Chunk c;
    REAL *scratch = new_chunk(&c, K, V);
    int64_t w = c.stride;
    REAL *states = malloc((size_t)(f->share * K * w) * sizeof(REAL));
    int can = scratch && states;
    for (int64_t r = first; can && r < end; r++) {
        int64_t b = r / f->n_heads, h = r % f->n_heads;
        for (int64_t start = 0; start < f->steps; start += c.n) {
            load_keys(&c, f, b, h, start);
            Matrix k = {c.kT, 1, TOKENS}, q = {c.qT, 1, TOKENS}, p = {c.P, TOKENS, 1};
            for (int64_t g = 0; g < f->share; g++) {
                int64_t head = h * f->share + g, memory = r * f->share + g;
                REAL *to = w == V ? f->after + memory * K * V : states + g * K * w;
                const REAL *s = to, *first = f->before + memory * K * V;
                if (!start && is_empty(first, K, V)) s = NULL;
                else if (!start && w == V) s = first;
                else if (!start) copy_rows(to, w, first, V, K, V);
                if (f->saved && start && start % f->save_every == 0)
                    copy_rows(
                        f->saved + (memory * intervals + start / f->save_every - 1) * K * V, V, s, w, K, V
                    );
                load_strengths(&c, f, b, head, start);
                decay_products(&c);
                c.z = errors_of(&c, f, b, head, start);
                if (s) multiply(c.z, NULL, w, 0, 1, k, s, w, c.n, V, K);
                else load_values(c.z, &c, &f->v, b, head, start);
                for (int64_t t = 0; s && t < c.n; t++) {
                    const REAL *v = TOKEN(f->v, b, head, start + t);
                    for (int64_t d = 0; d < V; d++) c.z[t * w + d] = v[d] - c.since[t] * c.z[t * w + d];
                }
                solve(&c);
                if (c.z == c.padded) store_values(c.z, &c, &f->errors, b, head, start);
                if (s) {
                    multiply(c.y, NULL, w, 0, 1, q, s, w, c.n, V, K);
                    scale(c.y, c.since, &c);
                }
                multiply_triangle(c.y, s ? c.y : NULL, w, p, 0, c.u, c.n, V);
                store_values(c.y, &c, &f->y, b, head, start);
                write(&c, to, s);
                if (w != V && start + c.n == f->steps)
                    copy_rows(f->after + memory * K * V, V, to, w, K, V);
            }
        }
    }
    free(scratch);
    free(states);
    return can;
}

/* ----- Backward */

/* What was written, again from the saved errors. */
static void load_written(Chunk *c, const Loop *f, int64_t b, int64_t head, int64_t start) {
    load_strengths(c, f, b, head, start);
    c->z = errors_of(c, f, b, head, start);
    if (c->z == c->padded) load_values(c->z, c, &f->errors, b, head, start);
    for (int64_t t = 0, w = c->stride; t < c->n; t++)
        for (int64_t d = 0; d < w; d++) c->u[t * w + d] = c->beta[t] * c->z[t * w + d];
}

/* From the gradient of u, those of z (in place) and of beta, from the last token to the first. */
static void solve_back(Chunk *c, REAL *d_u, const Loop *f, int64_t b, int64_t head, int64_t start) {
    int64_t w = c->stride;
    for (int64_t first = (c->n - 1) / 8 * 8; first >= 0; first -= 8) {
        int64_t end = first + 8 < c->n ? first + 8 : c->n;
        Matrix a = {c->A + end * TOKENS + first, 1, TOKENS};
        multiply(
            d_u + first * w, d_u + first * w, w, 1, -1, a, d_u + end * w, w, end - first, c->V, c->n - end
        );
        for (int64_t i = end - 1; i >= first; i--) {
            REAL *restrict d = d_u + i * w, sum = 0;
            for (int64_t j = i + 1; j < end; j++)
                for (int64_t e = 0; e < w; e++) d[e] -= c->A[j * TOKENS + i] * d_u[j * w + e];
            for (int64_t e = 0; e < w; e++) {
                sum += d[e] * c->z[i * w + e];
                d[e] *= c->beta[i];
            }
            *TOKEN(f->d_beta, b, head, start + i) = sum;
        }
    }
}

/* to += sign part, whose columns are scaled first; sums[t] += sign sum_c x[c, t] part[c, t] */
static void add_part(
    REAL *restrict to, REAL sign, REAL *restrict part, const REAL *by, const REAL *restrict x, REAL *sums,
    const Chunk *c
) {
    REAL factor[TOKENS] = {0}, sum[TOKENS] = {0};
    for (int64_t t = 0; t < c->n; t++) factor[t] = sign * by[t];
    for (int64_t i = 0; i < c->K; i++)
        for (int64_t t = 0; t < TOKENS; t++) {
            REAL d = factor[t] * part[i * TOKENS + t];
            to[i * TOKENS + t] += d;
            sum[t] += d * x[i * TOKENS + t];
        }
    for (int64_t t = 0; t < c->n; t++) sums[t] += sum[t];
}

/* Gradients of one head of values, given that of S after the chunk, d, which becomes that before it where
   anyone wants that; none: it is zero, and d uninitialised. s null: S before the chunk is zero. */
static void backward_chunk(
    Chunk *c, const Loop *f, int64_t b, int64_t head, int64_t start, const REAL *s, REAL *d, int none
) {
    int64_t n = c->n, w = c->stride, V = c->V, K = c->K;
    Matrix k = {c->kT, 1, TOKENS}, p_back = {c->P, 1, TOKENS};
    REAL to[TOKENS] = {0}, until[TOKENS] = {0}, *d_y = c->y, *d_u = c->u;
    load_written(c, f, b, head, start);
    decay_products(c);
    load_values(d_y, c, &f->d_y, b, head, start);
    side_by_side(c->uT, c->u, w, n, V);
    if (s) side_by_side(c->yT, d_y, w, n, V);
    if (!none) {
        multiply(d_u, NULL, w, 0, 1, k, d, w, n, V, K);
        scale(d_u, c->until, c);
    }
    multiply_triangle(d_u, none ? NULL : d_u, w, p_back, 1, d_y, n, V);
    solve_back(c, d_u, f, b, head, start);
    store_values(d_u, c, &f->d_v, b, head, start);
    if (s) side_by_side(c->zT, d_u, w, n, V);

    Matrix read = {d_y, w, 1}, error = {d_u, w, 1};
    multiply_below(c->d_P, 1, read, c->uT, n, V);
    multiply_below(c->d_A, -1, error, c->uT, n, V);
    for (int64_t i = 0; i < n; i++) {
        Lanes sum = {0};
        for (int64_t j = 0, at = i * TOKENS; j < TOKENS; j += LANES, at += LANES) {
            Lanes between = *(Lanes *)(c->between + at), *column = (Lanes *)(to + j);
            Lanes of_A = up_to(i - 1, *(Lanes *)(c->d_A + at), j);
            Lanes of_P = up_to(i, *(Lanes *)(c->d_P + at), j);
            /* From a token to itself nothing decays: what would cancel is far larger than gradients of
               strong decays. */
            Lanes both = of_A * *(Lanes *)(c->A + at) + up_to(i - 1, of_P * *(Lanes *)(c->P + at), j);
            sum += both, *column -= both;
            *(Lanes *)(c->d_gram + at) += between * of_A;
            *(Lanes *)(c->d_scores + at) += between * of_P;
        }
        for (int64_t e = 0; e < LANES; e++) to[i] += sum[e];
    }

    Matrix before = {s, w, 1}, after = {d, w, 1};
    if (s) {
        multiply(c->part, NULL, TOKENS, 0, 1, before, c->yT, TOKENS, K, n, V);
        add_part(c->d_qT, 1, c->part, c->since, c->qT, to, c);
        multiply(c->part, NULL, TOKENS, 0, 1, before, c->zT, TOKENS, K, n, V);
        add_part(c->d_kT, -1, c->part, c->since, c->kT, to, c);
    }
    REAL sum = 0, whole = 0;
    if (!none) {
        multiply(c->part, NULL, TOKENS, 0, 1, after, c->uT, TOKENS, K, n, V);
        add_part(c->d_kT, 1, c->part, c->until, c->kT, until, c);
        for (int64_t i = 0; s && i < K * w; i++) whole += s[i] * d[i];
        whole *= c->whole;
    }

    /* Token t decays what goes from earlier tokens, or the chunk's start, to t or later ones. */
    for (int64_t t = n - 1; t >= 0; t--) to[t] = sum += to[t];
    for (int64_t t = 0; t < n; t++) {
        *TOKEN(f->d_log_decay, b, head, start + t) = to[t] + whole;
        whole += until[t];
    }

    if (!start && !f->d_before) return;
    Matrix kT = {c->kT, TOKENS, 1}, qT = {c->qT, TOKENS, 1};
    scale(d_y, c->since, c);
    scale(d_u, c->since, c);
    multiply(d, none ? NULL : d, w, c->whole, 1, qT, d_y, w, K, V, n);
    multiply(d, d, w, 1, -1, kT, d_u, w, K, V, n);
}

/* The part of the gradients of keys and queries that their products have, and all of it stored. */
static void finish_keys(Chunk *c, const Loop *f, int64_t b, int64_t h, int64_t start) {
    int64_t n = c->n;
    Matrix kT = {c->kT, TOKENS, 1}, qT = {c->qT, TOKENS, 1};
    side_by_side(c->square, c->d_scores, TOKENS, n, n);
    multiply(c->d_qT, c->d_qT, TOKENS, 1, 1, kT, c->square, TOKENS, c->K, n, n);
    multiply(c->d_kT, c->d_kT, TOKENS, 1, 1, qT, c->d_scores, TOKENS, c->K, n, n);
    side_by_side(c->square, c->d_gram, TOKENS, n, n);
    for (int64_t i = 0; i < n * TOKENS; i++) c->square[i] += c->d_gram[i];
    multiply(c->d_kT, c->d_kT, TOKENS, 1, 1, kT, c->square, TOKENS, c->K, n, n);
    transpose(TOKEN(f->d_k, b, h, start), f->d_k.token, c->d_kT, TOKENS, c->K, n);
    transpose(TOKEN(f->d_q, b, h, start), f->d_q.token, c->d_qT, TOKENS, c->K, n);
}

/* The memory of head g of those that item r serves, before the tokens from past on of an interval; null if
   it is empty. */
static const REAL *state_before(
    const Loop *f, const Chunk *c, REAL *states, int64_t r, int64_t g, int64_t interval, int64_t past
) {
    int64_t K = c->K, V = c->V, w = c->stride, longest = (f->save_every + TOKENS - 1) / TOKENS;
    int64_t intervals = (f->steps - 1) / f->save_every, number = r * f->share + g;
    REAL *s = states + (g * longest + past / TOKENS) * K * w;
    if (past) return s;
    const REAL *from = f->before + number * K * V;
    if (interval) from = f->saved + (number * intervals + interval - 1) * K * V;
    else if (is_empty(from, K, V)) return NULL;
    if (w == V) return from;
    copy_rows(s, w, from, V, K, V);
    return s;
}

/* Intervals from last to first: the memory before each chunk is found again from the saved one. */
static int backward_chunks(const Loop *f, int64_t first, int64_t end) {
    int64_t K = f->n_features, V = f->value_width, intervals = (f->steps - 1) / f->save_every;
    int64_t share = f->share, longest = (f->save_every + TOKENS - 1) / TOKENS;
    Chunk c;
    REAL *scratch = new_chunk(&c, K, V);
    int64_t w = c.stride, memory = K * w;
    REAL *states = malloc((size_t)(share * (longest + 1) * memory) * sizeof(REAL));
    int can = scratch && states;
    REAL *gradients = states + share * longest * memory;
    for (int64_t r = first; can && r < end; r++) {
        int64_t b = r / f->n_heads, h = r % f->n_heads;
        for (int64_t i = intervals; i >= 0; i--) {
            int64_t begin = i * f->save_every, stop = i < intervals ? begin + f->save_every : f->steps;
            for (int64_t start = begin; start + TOKENS < stop; start += TOKENS) {
                c.n = TOKENS;
                side_by_side(c.kT, TOKEN(f->k, b, h, start), f->k.token, c.n, K);
                for (int64_t g = 0; g < share; g++) {
                    load_written(&c, f, b, h * share + g, start);
                    REAL *to = states + (g * longest + (start - begin) / TOKENS + 1) * memory;
                    write(&c, to, state_before(f, &c, states, r, g, i, start - begin));
                }
            }
            int64_t last = begin + (stop - begin - 1) / TOKENS * TOKENS;
            for (int64_t start = last; start >= begin; start -= TOKENS) {
                load_keys(&c, f, b, h, start);
                memset(c.d_kT, 0, K * TOKENS * sizeof(REAL));
                memset(c.d_qT, 0, K * TOKENS * sizeof(REAL));
                memset(c.d_gram, 0, TOKENS * TOKENS * sizeof(REAL));
                memset(c.d_scores, 0, TOKENS * TOKENS * sizeof(REAL));
                for (int64_t g = 0; g < share; g++) {
                    const REAL *s = state_before(f, &c, states, r, g, i, start - begin);
                    int64_t number = (r * share + g) * K * V;
                    REAL *d = gradients + g * memory;
                    int last = start + c.n == f->steps;
                    if (last && f->d_after) copy_rows(d, w, f->d_after + number, V, K, V);
                    backward_chunk(&c, f, b, h * share + g, start, s, d, last && !f->d_after);
                    if (f->d_before && !start) copy_rows(f->d_before + number, V, d, w, K, V);
                }
                finish_keys(&c, f, b, h, start);
            }
        }
    }
    free(scratch);
    free(states);
    return can;
}
