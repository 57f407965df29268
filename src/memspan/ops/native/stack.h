/* One token of every row through a stack of layers: norm, attention, norm, feed-forward, each half added
   to its input. What happens between the projections and the attention's output is the architecture's. */

#include "loop.h"

/* Weights are [outputs, inputs], as PyTorch has them. Null: no norm, no bias. */
typedef struct {
    const REAL *norm_weight, *norm_bias, *projections, *projections_bias, *output, *output_bias,
        *inner_norm_weight, *inner_norm_bias, *inner, *inner_bias, *outer, *outer_bias;
} Layer;

typedef struct {
    long batch, n_layers, d_model, n_heads, width, d_projected, d_ff, gelu;
    double norm_epsilon;
    const REAL *final_weight, *final_bias; /* null: no norm */
    const Layer *layers;
    REAL *x; /* [B, D], in and out */
} Stack;

/* The matrices of one layer, ready for products. */
typedef struct {
    Packed projections, output, inner, outer;
} Matrices;

/* What a token needs besides. */
typedef struct {
    REAL *z, *inside, *attended, *moments;
} Scratch;

void release(Matrices *m, long n_layers) {
    for (long l = 0; l < n_layers; l++) {
        free(m[l].projections.panels);
        free(m[l].output.panels);
        free(m[l].inner.panels);
        free(m[l].outer.panels);
    }
    free(m);
}

/* Null if out of memory. */
Matrices *prepare(const Stack *s) {
    long D = s->d_model, I = s->n_heads * s->width;
    Matrices *m = calloc((size_t)s->n_layers, sizeof(Matrices));
    if (!m) return NULL;
    for (long l = 0; l < s->n_layers; l++) {
        const Layer *layer = s->layers + l;
        m[l].projections = pack(layer->projections, D, s->d_projected, 1, D);
        m[l].output = pack(layer->output, I, D, 1, I);
        m[l].inner = pack(layer->inner, D, s->d_ff, 1, D);
        m[l].outer = pack(layer->outer, s->d_ff, D, 1, s->d_ff);
        const Matrices *made = m + l;
        if (!made->projections.panels || !made->output.panels || !made->inner.panels ||
            !made->outer.panels) {
            release(m, s->n_layers);
            return NULL;
        }
    }
    return m;
}

/* One block, beginning at z; null if out of memory. */
static Scratch new_scratch(const Stack *s) {
    long B = s->batch, I = s->n_heads * s->width;
    long inside = s->d_projected > s->d_ff ? s->d_projected : s->d_ff;
    REAL *z = malloc((size_t)(B * (s->d_model + inside + I + 2)) * sizeof(REAL));
    if (!z) return (Scratch){0};
    REAL *projected = z + B * s->d_model, *attended = projected + B * inside;
    return (Scratch){z, projected, attended, attended + B * I};
}

static void affine_norm(
    const Stack *s, const REAL *x, REAL *z, REAL *moments, const REAL *gain, const REAL *bias
) {
    long B = s->batch, D = s->d_model;
    if (!gain) {
        memmove(z, x, B * D * sizeof(REAL));
        return;
    }
    normalise(x, z, moments, moments + B, B, D, s->norm_epsilon);
    for (long i = 0; i < B; i++, z += D)
        for (long d = 0; d < D; d++) z[d] = z[d] * gain[d] + bias[d];
}

/* The projections of layer l, [B, P] in t->inside. */
static void project(const Stack *s, const Matrices *m, const Scratch *t, long l) {
    const Layer *layer = s->layers + l;
    affine_norm(s, s->x, t->z, t->moments, layer->norm_weight, layer->norm_bias);
    product(
        t->z, s->d_model, &m[l].projections, s->batch, layer->projections_bias, NULL, t->inside,
        s->d_projected, 0
    );
}

/* The rest of layer l after the heads' attention, [B, H K] in t->attended. */
static void after_attention(const Stack *s, const Matrices *m, const Scratch *t, long l) {
    const Layer *layer = s->layers + l;
    long B = s->batch, D = s->d_model, I = s->n_heads * s->width, F = s->d_ff;
    REAL *x = s->x;
    product(t->attended, I, &m[l].output, B, layer->output_bias, x, x, D, 0);
    affine_norm(s, x, t->z, t->moments, layer->inner_norm_weight, layer->inner_norm_bias);
    product(t->z, D, &m[l].inner, B, layer->inner_bias, NULL, t->inside, F, !s->gelu);
    if (s->gelu) gelu(t->inside, t->inside, B * F);
    product(t->inside, F, &m[l].outer, B, layer->outer_bias, x, x, D, 0);
}

static void final_norm(const Stack *s, const Scratch *t) {
    affine_norm(s, s->x, s->x, t->moments, s->final_weight, s->final_bias);
}
