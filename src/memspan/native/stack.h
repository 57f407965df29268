/* One token of every row through a stack of layers: norm, attention, norm, feed-forward, each half added
   to its input, or joined to it by a gate. What happens between the projections
   and the attention's output is the architecture's. */

#include "loop.h"

/* Of GRUGate: [3 D, D], [2 D, D], [D, D], [D]. */
typedef struct {
    const REAL *of_branch, *of_stream, *of_reset_stream, *bias;
} Gate;

/* Weights are [outputs, inputs], as PyTorch has them. Null: no norm, no bias, no gate. */
typedef struct {
    const REAL *norm_weight, *norm_bias, *projections, *projections_bias, *output, *output_bias,
        *inner_norm_weight, *inner_norm_bias, *inner, *inner_bias, *outer, *outer_bias;
    Gate gates[2]; /* after attention, after feed-forward */
} Layer;

typedef struct {
    int64_t batch, n_layers, d_model, n_heads, width, d_projected, d_ff, gelu; /* d_ff may be 0 */
    double norm_epsilon;
    const REAL *final_weight, *final_bias; /* null: no norm */
    const Layer *layers;
    REAL *x; /* [B, D], in and out */
} Stack;

/* The matrices of one layer, ready for products; what a layer does not have is zero. */
typedef struct {
    Packed of_branch, of_stream, of_reset_stream;
} GateMatrices;

typedef struct {
    Packed projections, output, inner, outer;
    GateMatrices gates[2];
} Matrices;

#define PACKED (sizeof(Matrices) / sizeof(Packed))

/* What a token needs besides. */
typedef struct {
    REAL *z, *inside, *attended, *moments, *gate;
} Scratch;

EXPORT void release(Matrices *m, int64_t n_layers) {
    for (size_t n = 0; n < n_layers * PACKED; n++) free(((Packed *)m)[n].panels);
    free(m);
}

/* Null if out of memory. */
EXPORT Matrices *prepare(const Stack *s) {
    int64_t D = s->d_model, I = s->n_heads * s->width;
    Matrices *m = calloc((size_t)s->n_layers, sizeof(Matrices));
    if (!m) return NULL;
    for (int64_t l = 0; l < s->n_layers; l++) {
        const Layer *layer = s->layers + l;
        m[l].projections = pack(layer->projections, D, s->d_projected, 1, D);
        m[l].output = pack(layer->output, I, D, 1, I);
        m[l].inner = pack(layer->inner, D, s->d_ff, 1, D);
        if (s->d_ff) m[l].outer = pack(layer->outer, s->d_ff, D, 1, s->d_ff);
        for (int i = 0; i < 2 && layer->gates[i].bias; i++) {
            GateMatrices *gate = m[l].gates + i;
            gate->of_branch = pack(layer->gates[i].of_branch, D, 3 * D, 1, D);
            gate->of_stream = pack(layer->gates[i].of_stream, D, 2 * D, 1, D);
            gate->of_reset_stream = pack(layer->gates[i].of_reset_stream, D, D, 1, D);
        }
        for (const Packed *p = (const Packed *)(m + l); p < (const Packed *)(m + l + 1); p++)
            if (p->columns && !p->panels) {
                release(m, s->n_layers);
                return NULL;
            }
    }
    return m;
}

/* One block, beginning at z; null if out of memory. */
static Scratch new_scratch(const Stack *s) {
    int64_t B = s->batch, I = s->n_heads * s->width;
    int64_t inside = s->d_projected > s->d_ff ? s->d_projected : s->d_ff;
    int64_t gate = s->layers->gates->bias ? 6 * s->d_model : 0;
    REAL *z = malloc((size_t)(B * (s->d_model + inside + I + 2 + gate)) * sizeof(REAL));
    if (!z) return (Scratch){0};
    REAL *projected = z + B * s->d_model, *attended = projected + B * inside;
    return (Scratch){z, projected, attended, attended + B * I, attended + B * (I + 2)};
}

static void affine_norm(
    const Stack *s, const REAL *x, REAL *z, REAL *moments, const REAL *gain, const REAL *bias
) {
    int64_t B = s->batch, D = s->d_model;
    if (!gain) {
        memmove(z, x, B * D * sizeof(REAL));
        return;
    }
    normalise(x, z, moments, moments + B, B, D, s->norm_epsilon);
    for (int64_t i = 0; i < B; i++, z += D)
        for (int64_t d = 0; d < D; d++) z[d] = z[d] * gain[d] + bias[d];
}

/* The projections of layer l, [B, P] in t->inside. */
static void project(const Stack *s, const Matrices *m, const Scratch *t, int64_t l) {
    const Layer *layer = s->layers + l;
    affine_norm(s, s->x, t->z, t->moments, layer->norm_weight, layer->norm_bias);
    product(
        t->z, s->d_model, &m[l].projections, s->batch, layer->projections_bias, NULL, t->inside,
        s->d_projected, 0
    );
}

/* s->x, joined by the product of a and p: added or, with gates, by gate i of layer l. */
static void join(
    const Stack *s, const Matrices *m, const Scratch *t, int64_t l, int i, const REAL *a, const Packed *p,
    const REAL *bias
) {
    const GateMatrices *gate = m[l].gates + i;
    const REAL *b = s->layers[l].gates[i].bias;
    int64_t B = s->batch, D = s->d_model;
    REAL *x = s->x, *y = t->gate, *branch = y + B * D, *stream = branch + 3 * B * D;
    product(a, p->depth, p, B, bias, b ? NULL : x, b ? y : x, D, b != NULL);
    if (!b) return;
    product(y, D, &gate->of_branch, B, NULL, NULL, branch, 3 * D, 0);
    product(x, D, &gate->of_stream, B, NULL, NULL, stream, 2 * D, 0);
    for (int64_t r = 0; r < B; r++) {
        const REAL *reset = branch + r * 3 * D, *own = stream + r * 2 * D;
        for (int64_t d = 0; d < D; d++) y[r * D + d] = x[r * D + d] * sigmoid(reset[d] + own[d]);
    }
    /* In place of W_r y. */
    product(y, D, &gate->of_reset_stream, B, NULL, NULL, branch, 3 * D, 0);
    for (int64_t r = 0; r < B; r++, x += D) {
        const REAL *of_reset = branch + r * 3 * D, *update = of_reset + D, *candidate = update + D,
                   *own = stream + r * 2 * D + D;
        for (int64_t d = 0; d < D; d++) {
            REAL z = sigmoid(update[d] + own[d] - b[d]), h = candidate[d] + of_reset[d];
            x[d] += z * ((sizeof(REAL) == 4 ? tanhf(h) : tanh(h)) - x[d]);
        }
    }
}

/* The rest of layer l after the heads' attention, [B, H K] in t->attended. */
static void after_attention(const Stack *s, const Matrices *m, const Scratch *t, int64_t l) {
    const Layer *layer = s->layers + l;
    int64_t B = s->batch, D = s->d_model, F = s->d_ff;
    join(s, m, t, l, 0, t->attended, &m[l].output, layer->output_bias);
    if (!F) return;
    affine_norm(s, s->x, t->z, t->moments, layer->inner_norm_weight, layer->inner_norm_bias);
    product(t->z, D, &m[l].inner, B, layer->inner_bias, NULL, t->inside, F, !s->gelu);
    if (s->gelu) gelu(t->inside, t->inside, B * F);
    join(s, m, t, l, 1, t->inside, &m[l].outer, layer->outer_bias);
}

static void final_norm(const Stack *s, const Scratch *t) {
    affine_norm(s, s->x, s->x, t->moments, s->final_weight, s->final_bias);
}

/* ----- A token's short convolution, and activations */

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
