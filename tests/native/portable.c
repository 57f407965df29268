/* Runs the C of Fast Weights on made-up numbers, at odd sizes and at those it has code of its own for, and
   prints a line for each result: weighted sums of its numbers. test_portable.py has a processor of another kind
   run it, too. */

#include "compiled.c"
#include <stdio.h>

static unsigned state = 1;
static REAL random_number(void) {
    state = state * 1664525u + 1013904223u;
    return (REAL)((state >> 9) / 8388608.0 - 0.5);
}

static REAL *numbers(int64_t n, double scale, double shift) {
    REAL *x = malloc((size_t)n * sizeof(REAL));
    for (int64_t i = 0; i < n; i++) x[i] = (REAL)(random_number() * scale + shift);
    return x;
}

static void show(const char *name, const REAL *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (1 + i % 7) * (double)x[i] / (double)n;
    printf("%s %.17g\n", name, sum);
}

static View view(int64_t H, int64_t T, int64_t w, double scale, double shift) {
    return (View){numbers(2 * H * T * w, scale, shift), H * T * w, T * w, w};
}

/* Forward and backward over T tokens of two rows, one of which begins anew halfway. */
static void rule(int decays, int64_t T, int64_t K, int64_t V, int64_t nu, int delta) {
    int64_t H = 2, share = decays ? 2 : 1, G = H * share, F = nu ? 2 * K * nu : K, save = decays ? 32 : 16;
    int64_t intervals = (T - 1) / save;
    unsigned char *starts = calloc((size_t)(2 * T), 1);
    starts[T / 2] = 1;
    Loop f = {
        .n_heads = H, .share = share, .steps = T, .width = K, .value_width = V, .n_features = F, .nu = nu,
        .normalises = nu > 0, .delta = delta, .save_every = save, .epsilon = 1e-6, .starts = starts
    };
    f.q = view(H, T, K, 0.6, 0), f.k = view(H, T, K, 0.6, 0), f.v = view(G, T, V, 2, 0);
    f.beta = view(G, T, 1, 0.8, 0.5), f.y = view(G, T, V, 0, 0), f.errors = view(G, T, V, 0, 0);
    if (decays) f.log_decay = view(G, T, 1, 0.4, -0.3), f.d_log_decay = view(G, T, 1, 0, 0);
    f.d_q = view(H, T, K, 0, 0), f.d_k = view(H, T, K, 0, 0), f.d_v = view(G, T, V, 0, 0);
    f.d_beta = view(G, T, 1, 0, 0), f.d_y = view(G, T, V, 2, 0);
    int64_t m = 2 * G * F * V;
    f.before = numbers(m, 1, 0), f.d_after = numbers(m, 1, 0), f.after = numbers(m, 0, 0);
    f.d_before = numbers(m, 0, 0), f.saved = numbers(m * (intervals + 1), 0, 0);
    if (!forward(&f, 0, 2 * H) || !backward(&f, 0, 2 * H)) printf("out of memory\n");
    show("y", f.y.data, 2 * G * T * V), show("after", f.after, m), show("d_before", f.d_before, m);
    show("d_q", f.d_q.data, 2 * H * T * K), show("d_k", f.d_k.data, 2 * H * T * K);
    show("d_v", f.d_v.data, 2 * G * T * V);
    if (delta) show("d_beta", f.d_beta.data, 2 * G * T);
    if (decays) show("d_log_decay", f.d_log_decay.data, 2 * G * T);
}

int main(void) {
    rule(0, 37, 5, 7, 3, 1), rule(0, 37, 16, 16, 1, 0), rule(0, 20, 9, 33, 0, 1);
    rule(1, 71, 17, 19, 0, 1), rule(1, 64, 32, 32, 0, 1), rule(1, 3, 16, 24, 0, 1);
    int64_t B = 3, L = 2, D = 24, H = 2, K = 12, I = H * K, P = 3 * I + H, FF = 37;
    Layer layers[2];
    REAL *memories[2];
    for (int l = 0; l < 2; l++) {
        layers[l] = (Layer){
            numbers(D, 1, 1), numbers(D, 1, 0), numbers(P * D, 0.4, 0), numbers(P, 1, 0),
            numbers(D * I, 0.4, 0), numbers(D, 1, 0), numbers(D, 1, 1), numbers(D, 1, 0),
            numbers(FF * D, 0.4, 0), numbers(FF, 1, 0), numbers(D * FF, 0.4, 0), numbers(D, 1, 0), {{0}}
        };
        memories[l] = numbers(B * H * 2 * K * 2 * K, 1, 0);
    }
    REAL *x = numbers(B * D, 2, 0);
    Step s = {
        .stack = {B, L, D, H, K, P, FF, 1, 1e-5, numbers(D, 1, 1), numbers(D, 1, 0), layers, x},
        .nu = 2, .normalises = 1, .delta = 1, .epsilon = 1e-6, .memories = memories
    };
    Matrices *w = prepare(&s.stack);
    for (int i = 0; i < 5; i++)
        if (step(&s, w) < 0) printf("out of memory\n");
    show("x", x, B * D), show("memory", memories[1], B * H * 2 * K * 2 * K);
    release(w, L);
    return 0;
}
