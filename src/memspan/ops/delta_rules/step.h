/* One token of every row through all layers of a stack with matrix memories, without gradients, for
   compiled.c. */

/* Of a layer, beside what the stack has. */
typedef struct {
    const REAL *convolution, *convolution_bias; /* [taps, C], the token's own last, and [C]; may be null */
    const REAL *rate, *step_bias; /* [H] and [n_steps]: the logarithm of a decay is rate softplus(step + bias) */
    const REAL *gain;             /* [n_gains] */
    const REAL *skip;             /* [H]: how much of its value a head passes on; may be null */
    REAL *memory, *inputs;        /* [B, H, K, V] and [B, taps - 1, C], written in place */
} StepLayer;

/* The stack's heads and width are those of values. Projections are queries, keys and values of each write, the
   output's gates, logits of beta, logits of what is erased and written, and steps of the decay. */
typedef struct {
    Stack stack;
    int64_t key_heads, key_width, taps;
    int64_t writes;  /* of a token, at most TOKENS, before it reads */
    int64_t n_betas; /* writes H or, unless it is the delta rule, 0 */
    int64_t n_erases; /* channels of all keys or, unless each has an erase gate and each value a write gate, 0 */
    int64_t n_steps; /* H, channels of all keys, or 0: the logarithm of a decay is the rate */
    int64_t unit;    /* whether queries and keys have length 1 */
    int64_t scales_values; /* whether a value is written times its step */
    int64_t sigmoid; /* whether that is the gate's activation, not SiLU */
    int64_t gate_first; /* whether outputs are normalised after the gate */
    int64_t normed, n_gains; /* outputs normalised together, and gains, for as many outputs in turn */
    double query_scale, largest, epsilon; /* largest: of beta and erase gates */
    const StepLayer *layers;
} TokenStep;

/* Token j of t = write j of head h, from the projections p of one row. */
static void load_write(Tokens *t, const TokenStep *s, const StepLayer *layer, const REAL *p, int64_t h, int64_t j) {
    int64_t H = s->stack.n_heads, K = s->key_width, V = s->stack.width, keys = s->key_heads * K, I = H * V;
    int64_t n = s->writes, at = h / (H / s->key_heads) * K, first = j * t->depth;
    const REAL *k = p + (1 + j) * keys + at, *v = p + (1 + n) * keys + j * I + h * V;
    const REAL *beta = p + (1 + n) * keys + (n + 1) * I, *erase = beta + s->n_betas, *write = erase + s->n_erases;
    const REAL *step = write + (s->n_erases ? I : 0);
    REAL *restrict x = t->v + j * t->width, *restrict alpha = t->alpha + first, *restrict c = t->c + first;
    REAL rate = layer->rate[h], largest = s->largest, size = 1;
    copy(t->k + first, k, K);
    if (j == n - 1) copy(t->q + first, p + at, K);
    else memset(t->q + first, 0, K * sizeof(REAL));
    if (t->width > V) memset(x + V, 0, (t->width - V) * sizeof(REAL));
    copy(x, v, V);
    if (j || s->n_steps <= H) {
        if (s->n_steps) size = softplus(step[h] + layer->step_bias[h]);
        REAL decay = j ? 1 : exponential(rate * size);
        for (int64_t i = 0; i < K; i++) alpha[i] = decay;
    } else {
        const REAL *own = step + h * K, *bias = layer->step_bias + h * K;
        for (int64_t i = 0; i < K; i++) alpha[i] = rate * softplus(own[i] + bias[i]);
        for (int64_t i = 0; i < K; i++) alpha[i] = exponential(alpha[i]);
    }
    if (s->scales_values)
        for (int64_t i = 0; i < V; i++) x[i] *= size;
    t->beta[j] = s->n_betas ? largest * sigmoid(beta[j * H + h]) : 1;
    for (int64_t i = 0; i < K; i++) c[i] = alpha[i] * k[i];
    if (!s->n_erases) return;
    for (int64_t i = 0; i < K; i++) c[i] *= largest * sigmoid(erase[h * K + i]);
    for (int64_t i = 0; i < V; i++) x[i] *= sigmoid(write[h * V + i]);
}

/* Branches outside of the loops: within, the compiler computes one exponential at a time. */
INLINE void silu(REAL *restrict x, const REAL *restrict gate, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= gate[i] * sigmoid(gate[i]);
}

/* The heads' outputs y [H V], normalised and gated. */
static void normalise_and_gate(
    const TokenStep *s, const StepLayer *layer, REAL *restrict y, const REAL *restrict gate
) {
    int64_t I = s->stack.n_heads * s->stack.width, n = s->normed;
    if (s->gate_first) silu(y, gate, I);
    for (int64_t first = 0; first < I; first += n) {
        REAL *restrict z = y + first, by = 1 / sqrt(dot(z, z, n) / n + s->epsilon);
        const REAL *restrict gain = layer->gain + first % s->n_gains;
        for (int64_t i = 0; i < n; i++) z[i] *= by * gain[i];
    }
    if (s->sigmoid)
        for (int64_t i = 0; i < I; i++) y[i] *= sigmoid(gate[i]);
    else if (!s->gate_first) silu(y, gate, I);
}

/* Rows first .. end - 1; false if out of memory. */
EXPORT int step(const TokenStep *s, const Matrices *matrices, int64_t first, int64_t end) {
    Stack stack = s->stack;
    int64_t H = stack.n_heads, V = stack.width, K = s->key_width, n = s->writes, I = H * V;
    int64_t keys = s->key_heads * K, C = keys + n * (keys + I), P = stack.d_projected;
    int kind = s->n_betas || s->n_erases ? REPLACES : KEEPS;
    stack.x += first * stack.d_model, stack.batch = end - first;
    Scratch scratch = new_scratch(&stack);
    Tokens t;
    REAL *tokens = new_tokens(&t, K, V), *padded = malloc((size_t)(K * t.width) * sizeof(REAL));
    int can = scratch.z && tokens && padded;
    t.n = n;
    for (int64_t l = 0; can && l < stack.n_layers; l++) {
        const StepLayer *layer = s->layers + l;
        project(&stack, matrices, &scratch, l);
        for (int64_t b = first; b < end; b++) {
            REAL *p = scratch.inside + (b - first) * P, *y = scratch.attended + (b - first) * I;
            if (layer->convolution) {
                convolve(p, layer->inputs + b * (s->taps - 1) * C, layer->convolution, C, s->taps);
                if (layer->convolution_bias)
                    for (int64_t c = 0; c < C; c++) p[c] += layer->convolution_bias[c];
                for (int64_t c = 0; c < C; c++) p[c] *= sigmoid(p[c]);
            }
            for (int64_t h = 0; s->unit && h < (1 + n) * s->key_heads; h++) {
                REAL *x = p + h * K, by = 1 / sqrt(dot(x, x, K) + s->epsilon);
                for (int64_t i = 0; i < K; i++) x[i] *= by;
            }
            for (int64_t c = 0; c < keys; c++) p[c] *= s->query_scale;
            for (int64_t h = 0; h < H; h++) {
                REAL *w = layer->memory + (b * H + h) * K * V, *to = t.width == V ? w : padded;
                for (int64_t j = 0; j < n; j++) load_write(&t, s, layer, p, h, j);
                if (to != w) copy_rows(to, t.width, w, V, K, V);
                read_tokens(&t, to, to, kind);
                if (to != w) copy_rows(w, V, to, t.width, K, V);
                const REAL *v = p + (1 + n) * keys + (n - 1) * I + h * V, *read = t.y + (n - 1) * t.width;
                for (int64_t i = 0; i < V; i++)
                    y[h * V + i] = read[i] + (layer->skip ? layer->skip[h] * v[i] : 0);
            }
            normalise_and_gate(s, layer, y, p + C);
        }
        after_attention(&stack, matrices, &scratch, l);
    }
    if (can) final_norm(&stack, &scratch);
    free(scratch.z);
    free(tokens);
    free(padded);
    return can;
}
