/* The generalized delta rule token by token, forward and backward.

   S' = diag(alpha) S - a f + k x with f = c S, and y = q S'. In the delta rule c = alpha k, and x = beta
   (v - f) is written without an a; elsewhere x = v.

   Forward, a memory is [K, V] and vectors run along values, so that sums over channels are plain. Columns do
   not depend on each other: of a few at a time the memory is read and written once per token, while y and
   the next token's f are summed. Backward, memories are [V, K] and vectors run along channels, so that the
   gradients of q, k, a, c and alpha, sums over values, are plain; f is known by then, so rows of values do
   not depend on each other, but for those sums. */

#include "stack.h"
#include "vectors.h"

#define TOKENS 32

/* [rows, heads, tokens, .] with any strides but the last, which is 1. */
typedef struct {
    REAL *data;
    int64_t row, head, token;
} View;

typedef struct {
    int64_t n_heads, share; /* heads of keys, and heads of values that each serves */
    int64_t steps, K, V;
    int64_t per_channel; /* whether each channel of a key has a decay of its own */
    int64_t save_every;  /* tokens between two saved memories, a multiple of TOKENS */
    /* Null: log_decay where nothing decays, beta unless it is the delta rule, erase and lookup where nothing
       is looked up or it is the delta rule. */
    View q, k, v, log_decay, erase, lookup, beta, y, found, d_q, d_k, d_v, d_log_decay, d_erase, d_lookup,
        d_beta, d_y;
    const REAL *before, *d_after; /* d_after may be null: zero */
    REAL *after, *d_before;       /* d_before may be null: not wanted */
    REAL *saved; /* the memory before each interval but the first, [rows, heads, intervals - 1, K, V] */
} Rule;

#define TOKEN(view, b, h, t) ((view).data + (b) * (view).row + (h) * (view).head + (t) * (view).token)

/* What a token does beside decaying, writing and reading. */
enum { KEEPS, ERASES, REPLACES };

static int kind_of(const Rule *f) { return f->beta.data ? REPLACES : f->erase.data ? ERASES : KEEPS; }

/* ----- Tokens, up to TOKENS of one head */

typedef struct {
    int64_t n, K, V, depth, width; /* tokens; widths, and these rounded up to whole vectors */
    REAL *q, *k, *alpha, *a, *c;   /* [TOKENS, depth] */
    REAL *v, *x, *f, *y;           /* [TOKENS, width] */
    REAL beta[TOKENS];
} Tokens;

static int64_t whole(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* One block, beginning at q; null if out of memory. */
static REAL *new_tokens(Tokens *t, int64_t K, int64_t V) {
    int64_t depth = whole(K), width = whole(V);
    REAL *at = malloc((size_t)(TOKENS * (5 * depth + 4 * width)) * sizeof(REAL));
    *t = (Tokens){.K = K, .V = V, .depth = depth, .width = width};
    REAL **parts[] = {&t->q, &t->k, &t->alpha, &t->a, &t->c, &t->v, &t->x, &t->f, &t->y};
    if (!at) return NULL;
    for (int i = 0; i < 9; i++) {
        *parts[i] = at;
        at += TOKENS * (i < 5 ? depth : width);
    }
    return t->q;
}

/* A few numbers: calling memcpy takes longer. */
INLINE void copy(REAL *to, const REAL *from, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        Lanes x = *(const Lanes *)(from + i);
        KEEP(x);
        *(Lanes *)(to + i) = x;
    }
    if (i < size) memcpy(to + i, from + i, (size - i) * sizeof(REAL));
}

/* to [n, stride] = the tokens from start on, each padded with zeros. */
static void gather(
    REAL *to, int64_t stride, const View *from, int64_t b, int64_t h, int64_t start, int64_t n, int64_t size
) {
    for (int64_t t = 0; t < n; t++, to += stride) {
        copy(to, TOKEN(*from, b, h, start + t), size);
        if (stride > size) memset(to + size, 0, (stride - size) * sizeof(REAL));
    }
}

static void scatter(
    const REAL *x, int64_t stride, const View *to, int64_t b, int64_t h, int64_t start, int64_t n, int64_t size
) {
    for (int64_t t = 0; t < n; t++)
        copy(TOKEN(*to, b, h, start + t), x + t * stride, size);
}

/* All but f, x and y of the next tokens from start on. */
static void load_tokens(Tokens *t, const Rule *f, int64_t b, int64_t h, int64_t head, int64_t start) {
    int64_t left = f->steps - start, n = t->n = left < TOKENS ? left : TOKENS, K = t->K, d = t->depth;
    gather(t->q, d, &f->q, b, h, start, n, K);
    gather(t->k, d, &f->k, b, h, start, n, K);
    gather(t->v, t->width, &f->v, b, head, start, n, t->V);
    if (f->log_decay.data && f->per_channel) {
        gather(t->alpha, d, &f->log_decay, b, head, start, n, K);
        for (int64_t i = 0; i < n * d; i++) t->alpha[i] = exponential(t->alpha[i]);
    } else
        for (int64_t i = 0; i < n; i++) {
            REAL alpha = f->log_decay.data ? exp(*TOKEN(f->log_decay, b, head, start + i)) : 1;
            for (int64_t j = 0; j < d; j++) t->alpha[i * d + j] = alpha;
        }
    if (f->beta.data) {
        for (int64_t i = 0; i < n; i++) t->beta[i] = *TOKEN(f->beta, b, head, start + i);
        for (int64_t i = 0; i < n * d; i++) t->c[i] = t->alpha[i] * t->k[i];
    } else if (f->erase.data) {
        gather(t->a, d, &f->erase, b, head, start, n, K);
        gather(t->c, d, &f->lookup, b, head, start, n, K);
    }
}

/* Rows of V numbers of a memory, padded with zeros. */
static void copy_rows(
    REAL *to, int64_t to_stride, const REAL *from, int64_t from_stride, int64_t K, int64_t V
) {
    for (int64_t i = 0; i < K; i++) {
        copy(to + i * to_stride, from + i * from_stride, V);
        if (to_stride > V) memset(to + i * to_stride + V, 0, (to_stride - V) * sizeof(REAL));
    }
}

/* ----- Forward */

/* Token n for `vectors` vectors of columns: what stands under each channel decays, loses a found and gains
   k x. Adds up what its query reads and, if `finds`, what the next token looks up. */
INLINE void change_columns(
    const Tokens *t, REAL *to, const REAL *from, int64_t n, const Lanes *found, const Lanes *x, Lanes *y,
    Lanes *finding, const int erases, const int finds, const int64_t vectors
) {
    int64_t w = t->width, at = n * t->depth;
    const REAL *q = t->q + at, *k = t->k + at, *alpha = t->alpha + at, *a = t->a + at, *next = t->c + at + t->depth;
    for (int64_t i = 0; i < t->K; i++)
        for (int64_t u = 0; u < vectors; u++) {
            Lanes s = alpha[i] * ((const Lanes *)(from + i * w))[u] + k[i] * x[u];
            if (erases) s -= a[i] * found[u];
            ((Lanes *)(to + i * w))[u] = s;
            y[u] += q[i] * s;
            if (finds) finding[u] += next[i] * s;
        }
}

/* All tokens for `vectors` vectors of columns, from column `at` on: y, f, and the memory after them. `to` may
   be `from`; both [K, width]. */
INLINE void read_columns(
    const Tokens *t, REAL *to, const REAL *from, int64_t at, const int kind, const int64_t vectors
) {
    int64_t w = t->width;
    Lanes found[4] = {0};
    to += at, from += at;
    for (int64_t i = 0; kind != KEEPS && i < t->K; i++)
        for (int64_t u = 0; u < vectors; u++) found[u] += t->c[i] * ((const Lanes *)(from + i * w))[u];
    for (int64_t n = 0; n < t->n; n++, from = to) {
        Lanes y[4] = {0}, x[4], finding[4] = {0};
        for (int64_t u = 0; u < vectors; u++) {
            x[u] = ((const Lanes *)(t->v + n * w + at))[u];
            if (kind == REPLACES) x[u] = t->beta[n] * (x[u] - found[u]);
            if (kind != KEEPS) ((Lanes *)(t->f + n * w + at))[u] = found[u];
        }
        if (kind != KEEPS && n + 1 < t->n)
            change_columns(t, to, from, n, found, x, y, finding, kind == ERASES, 1, vectors);
        else change_columns(t, to, from, n, found, x, y, finding, kind == ERASES, 0, vectors);
        for (int64_t u = 0; u < vectors; u++) {
            found[u] = finding[u];
            ((Lanes *)(t->y + n * w + at))[u] = y[u];
        }
    }
}

INLINE void read_kind(const Tokens *t, REAL *to, const REAL *from, const int kind) {
    int64_t at = 0;
    for (; at + 4 * LANES <= t->width; at += 4 * LANES) read_columns(t, to, from, at, kind, 4);
    for (; at + 2 * LANES <= t->width; at += 2 * LANES) read_columns(t, to, from, at, kind, 2);
    for (; at < t->width; at += LANES) read_columns(t, to, from, at, kind, 1);
}

static void read_tokens(const Tokens *t, REAL *to, const REAL *from, int kind) {
    if (kind == KEEPS) read_kind(t, to, from, KEEPS);
    else if (kind == ERASES) read_kind(t, to, from, ERASES);
    else read_kind(t, to, from, REPLACES);
}

/* Heads of keys first .. end - 1 of all rows; false if out of memory. */
EXPORT int forward(const Rule *f, int64_t first, int64_t end) {
    int64_t K = f->K, V = f->V, intervals = (f->steps - 1) / f->save_every;
    Tokens t;
    REAL *scratch = new_tokens(&t, K, V), *padded = malloc((size_t)(K * t.width) * sizeof(REAL));
    int can = scratch && padded;
    for (int64_t r = first * f->share; can && r < end * f->share; r++) {
        int64_t b = r / f->share / f->n_heads, h = r / f->share % f->n_heads, head = h * f->share + r % f->share;
        REAL *to = t.width == V ? f->after + r * K * V : padded;
        const REAL *from = f->before + r * K * V;
        if (to == padded) {
            copy_rows(padded, t.width, from, V, K, V);
            from = padded;
        }
        for (int64_t start = 0; start < f->steps; start += TOKENS, from = to) {
            if (f->saved && start && start % f->save_every == 0)
                copy_rows(f->saved + (r * intervals + start / f->save_every - 1) * K * V, V, to, t.width, K, V);
            load_tokens(&t, f, b, h, head, start);
            read_tokens(&t, to, from, kind_of(f));
            scatter(t.y, t.width, &f->y, b, head, start, t.n, V);
            if (f->found.data) scatter(t.f, t.width, &f->found, b, head, start, t.n, V);
        }
        if (to == padded) copy_rows(f->after + r * K * V, V, padded, t.width, K, V);
    }
    free(scratch);
    free(padded);
    return can;
}

/* ----- Backward */

/* Gradients of a chunk's tokens, summed over values: [TOKENS, depth]; and those of v and y, [TOKENS, width]. */
typedef struct {
    REAL *q, *k, *a, *c, *alpha, *v, *y;
    REAL beta[TOKENS];
    /* Memories before each token and after the last, of LANES rows of values, [TOKENS + 1, step]: a vector
       more than [LANES, depth], since at powers of two they would displace each other from the cache. */
    REAL *states;
    int64_t step;
} Gradients;

static REAL *new_gradients(Gradients *d, const Tokens *t) {
    int64_t keys = TOKENS * t->depth, values = TOKENS * t->width;
    REAL *at = malloc((size_t)(5 * keys + 2 * values + (TOKENS + 1) * LANES * (t->depth + 1)) * sizeof(REAL));
    *d = (Gradients){.step = LANES * (t->depth + 1)};
    if (!at) return NULL;
    REAL **parts[] = {&d->q, &d->k, &d->a, &d->c, &d->alpha, &d->v, &d->y, &d->states};
    for (int i = 0; i < 8; i++) {
        *parts[i] = at;
        at += i < 5 ? keys : values;
    }
    return d->q;
}

/* x, which tokens write under k, from the values that they found. */
static void load_written(Tokens *t, const Rule *f, int64_t b, int64_t head, int64_t start) {
    int64_t w = t->width;
    if (f->found.data) gather(t->f, w, &f->found, b, head, start, t->n, t->V);
    for (int64_t n = 0; n < t->n; n++)
        for (int64_t j = n * w; j < (n + 1) * w; j++)
            t->x[j] = f->beta.data ? t->beta[n] * (t->v[j] - t->f[j]) : t->v[j];
}

/* LANES rows of values from row `at` on, [LANES, depth], after each token: written `step` further than those
   before it, which may be 0. */
INLINE void write_rows(
    const Tokens *t, REAL *to, const REAL *from, int64_t step, int64_t at, const int kind
) {
    int64_t D = t->depth, w = t->width;
    for (int64_t i = 0; i < D; i += LANES)
        for (int64_t first = 0; first < LANES; first += 4) {
            Lanes s[4];
            for (int64_t r = 0; r < 4; r++) s[r] = *(const Lanes *)(from + (first + r) * D + i);
            for (int64_t n = 0; n < t->n; n++) {
                Lanes alpha = *(const Lanes *)(t->alpha + n * D + i), k = *(const Lanes *)(t->k + n * D + i);
                const REAL *x = t->x + n * w + at + first, *f = t->f + n * w + at + first;
                for (int64_t r = 0; r < 4; r++) {
                    s[r] = alpha * s[r] + k * x[r];
                    if (kind == ERASES) s[r] -= *(const Lanes *)(t->a + n * D + i) * f[r];
                    if (step) *(Lanes *)(to + n * step + (first + r) * D + i) = s[r];
                }
            }
            for (int64_t r = 0; r < 4 && !step; r++) *(Lanes *)(to + (first + r) * D + i) = s[r];
        }
}

#define ADD(to, sum) (*(Lanes *)(to) += (sum))

/* The part of token n's gradients that does not need those of f, for LANES rows of values from row `at` on
   and `vectors` vectors of channels from channel i on: G [LANES, depth], the gradient of the memory after
   it, grows by what it read. by_k and by_a [LANES, LANES]: sums over channels of k G and of a G, in parts. */
INLINE void back_from_write(
    const Tokens *t, const Gradients *d, REAL *G, REAL *by_k, REAL *by_a, int64_t n, int64_t at, int64_t i,
    const int kind, const int64_t vectors
) {
    int64_t D = t->depth, from = n * D + i;
    const REAL *before = d->states + n * d->step + i, *after = before + d->step;
    const REAL *x = t->x + n * t->width + at, *f = t->f + n * t->width + at, *d_y = d->y + n * t->width + at;
    const Lanes *q = (const Lanes *)(t->q + from), *k = (const Lanes *)(t->k + from);
    const Lanes *a = (const Lanes *)(t->a + from), *alpha = (const Lanes *)(t->alpha + from);
    Lanes d_q[4] = {0}, d_k[4] = {0}, d_a[4] = {0}, d_alpha[4] = {0};
    for (int64_t r = 0; r < LANES; r++) {
        Lanes of_k = {0}, of_a = {0};
        for (int64_t u = 0; u < vectors; u++) {
            Lanes *at_G = (Lanes *)(G + r * D + i) + u, g = *at_G + q[u] * d_y[r];
            d_q[u] += ((const Lanes *)(after + r * D))[u] * d_y[r];
            d_k[u] += g * x[r];
            if (kind == ERASES) d_a[u] -= g * f[r];
            d_alpha[u] += g * ((const Lanes *)(before + r * D))[u];
            of_k += k[u] * g;
            if (kind == ERASES) of_a += a[u] * g;
            if (kind == KEEPS) g *= alpha[u];
            *at_G = g;
        }
        if (i) of_k += *(Lanes *)(by_k + r * LANES), of_a += *(Lanes *)(by_a + r * LANES);
        *(Lanes *)(by_k + r * LANES) = of_k;
        if (kind == ERASES) *(Lanes *)(by_a + r * LANES) = of_a;
    }
    for (int64_t u = 0; u < vectors; u++) {
        ADD(d->q + from + u * LANES, d_q[u]);
        ADD(d->k + from + u * LANES, d_k[u]);
        if (kind == ERASES) ADD(d->a + from + u * LANES, d_a[u]);
        ADD(d->alpha + from + u * LANES, d_alpha[u]);
    }
}

/* The rest, from the gradients of f: G becomes the gradient of the memory before the token. */
INLINE void back_from_lookup(
    const Tokens *t, const Gradients *d, REAL *G, const REAL *d_f, int64_t n, int64_t i, const int64_t vectors
) {
    int64_t D = t->depth, from = n * D + i;
    const REAL *before = d->states + n * d->step + i;
    const Lanes *c = (const Lanes *)(t->c + from), *alpha = (const Lanes *)(t->alpha + from);
    Lanes d_c[4] = {0};
    for (int64_t r = 0; r < LANES; r++)
        for (int64_t u = 0; u < vectors; u++) {
            Lanes *g = (Lanes *)(G + r * D + i) + u;
            d_c[u] += ((const Lanes *)(before + r * D))[u] * d_f[r];
            *g = alpha[u] * *g + c[u] * d_f[r];
        }
    for (int64_t u = 0; u < vectors; u++) ADD(d->c + from + u * LANES, d_c[u]);
}

/* All tokens, last to first, for LANES rows of values from row `at` on, of memories s and G [LANES, depth]. */
INLINE void back_rows(
    const Tokens *t, Gradients *d, REAL *G, const REAL *s, int64_t at, const int kind
) {
    int64_t D = t->depth, wide = WIDEST * LANES, whole = D / wide * wide;
    REAL by_k[LANES * LANES], by_a[LANES * LANES], d_f[LANES];
    memcpy(d->states, s, LANES * D * sizeof(REAL));
    write_rows(t, d->states + d->step, d->states, d->step, at, kind == ERASES ? ERASES : KEEPS);
    for (int64_t n = t->n - 1; n >= 0; n--) {
        int64_t i = 0, here = n * t->width + at;
        for (; i < whole; i += wide) back_from_write(t, d, G, by_k, by_a, n, at, i, kind, WIDEST);
        for (; i < D; i += LANES) back_from_write(t, d, G, by_k, by_a, n, at, i, kind, 1);
        Lanes d_x = row_sums(by_k);
        if (kind == REPLACES) {
            Lanes error = *(Lanes *)(t->v + here) - *(Lanes *)(t->f + here);
            Lanes product = d_x * error;
            for (int64_t e = 0; e < LANES; e++) d->beta[n] += product[e];
            d_x *= t->beta[n];
        }
        *(Lanes *)(d->v + here) = d_x;
        if (kind == KEEPS) continue;
        *(Lanes *)d_f = kind == REPLACES ? -d_x : -row_sums(by_a);
        for (i = 0; i < whole; i += wide) back_from_lookup(t, d, G, d_f, n, i, WIDEST);
        for (; i < D; i += LANES) back_from_lookup(t, d, G, d_f, n, i, 1);
    }
}

/* The gradients of what a chunk's tokens were given; those of keys and queries, which heads of values may
   share, are added unless it is the first of these. */
static void store_gradients(
    const Tokens *t, Gradients *d, const Rule *f, int64_t b, int64_t h, int64_t head, int64_t start, int first
) {
    int64_t K = t->K, D = t->depth, size = t->n * D;
    if (f->beta.data)
        for (int64_t i = 0; i < size; i++) {
            d->k[i] += t->alpha[i] * d->c[i];
            d->alpha[i] += t->k[i] * d->c[i];
        }
    for (int64_t n = 0; n < t->n; n++) {
        REAL *d_q = TOKEN(f->d_q, b, h, start + n), *d_k = TOKEN(f->d_k, b, h, start + n), sum = 0;
        for (int64_t i = 0; i < K; i++) {
            d_q[i] = d->q[n * D + i] + (first ? 0 : d_q[i]);
            d_k[i] = d->k[n * D + i] + (first ? 0 : d_k[i]);
        }
        if (f->beta.data) *TOKEN(f->d_beta, b, head, start + n) = d->beta[n];
        if (!f->log_decay.data) continue;
        for (int64_t i = n * D; i < n * D + K; i++) {
            d->alpha[i] *= t->alpha[i];
            sum += d->alpha[i];
        }
        if (!f->per_channel) *TOKEN(f->d_log_decay, b, head, start + n) = sum;
    }
    if (f->log_decay.data && f->per_channel) scatter(d->alpha, D, &f->d_log_decay, b, head, start, t->n, K);
    if (f->erase.data) {
        scatter(d->a, D, &f->d_erase, b, head, start, t->n, K);
        scatter(d->c, D, &f->d_lookup, b, head, start, t->n, K);
    }
    scatter(d->v, t->width, &f->d_v, b, head, start, t->n, t->V);
}

/* to [width, depth] = a memory [K, V] transposed, zero beyond it. */
static void turn(REAL *to, const REAL *from, const Tokens *t) {
    memset(to, 0, t->width * t->depth * sizeof(REAL));
    transpose(to, t->depth, from, t->V, t->K, t->V);
}

/* Intervals between saved memories, last to first: each is read again, and then each of its chunks. */
EXPORT int backward(const Rule *f, int64_t first, int64_t end) {
    int64_t K = f->K, V = f->V, every = f->save_every, intervals = (f->steps - 1) / every;
    Tokens t;
    Gradients d;
    REAL *scratch = new_tokens(&t, K, V), *sums = new_gradients(&d, &t);
    int64_t D = t.depth, size = t.width * D, kind = kind_of(f);
    int64_t chunks = ((f->steps < every ? f->steps : every) + TOKENS - 1) / TOKENS;
    REAL *states = malloc((size_t)((chunks + 1) * size) * sizeof(REAL)), *G = states + chunks * size;
    int can = scratch && sums && states;
    for (int64_t r = first * f->share; can && r < end * f->share; r++) {
        int64_t b = r / f->share / f->n_heads, h = r / f->share % f->n_heads, head = h * f->share + r % f->share;
        if (f->d_after) turn(G, f->d_after + r * K * V, &t);
        else memset(G, 0, size * sizeof(REAL));
        for (int64_t interval = intervals; interval >= 0; interval--) {
            int64_t begin = interval * every, stop = interval < intervals ? begin + every : f->steps;
            int64_t last = (stop - begin - 1) / TOKENS;
            turn(states, interval ? f->saved + (r * intervals + interval - 1) * K * V : f->before + r * K * V, &t);
            for (int64_t m = 0; m < last; m++) {
                load_tokens(&t, f, b, h, head, begin + m * TOKENS);
                load_written(&t, f, b, head, begin + m * TOKENS);
                REAL *now = states + m * size;
                for (int64_t at = 0; at < t.width; at += LANES)
                    if (kind == ERASES) write_rows(&t, now + size + at * D, now + at * D, 0, at, ERASES);
                    else write_rows(&t, now + size + at * D, now + at * D, 0, at, KEEPS);
            }
            for (int64_t m = last; m >= 0; m--) {
                int64_t start = begin + m * TOKENS;
                load_tokens(&t, f, b, h, head, start);
                load_written(&t, f, b, head, start);
                gather(d.y, t.width, &f->d_y, b, head, start, t.n, V);
                memset(d.q, 0, 5 * TOKENS * D * sizeof(REAL));
                memset(d.beta, 0, sizeof d.beta);
                for (int64_t at = 0; at < t.width; at += LANES) {
                    const REAL *s = states + m * size + at * D;
                    if (kind == KEEPS) back_rows(&t, &d, G + at * D, s, at, KEEPS);
                    else if (kind == ERASES) back_rows(&t, &d, G + at * D, s, at, ERASES);
                    else back_rows(&t, &d, G + at * D, s, at, REPLACES);
                }
                store_gradients(&t, &d, f, b, h, head, start, r % f->share == 0);
            }
        }
        if (f->d_before) transpose(f->d_before + r * K * V, V, G, D, V, K);
    }
    free(scratch);
    free(sums);
    free(states);
    return can;
}

#include "step.h"
