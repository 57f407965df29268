/* What the compiled loops share. REAL is float or double. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef REAL
#define REAL float
#endif

/* ----- Products of few rows with a fixed matrix */

/* Two vectors wide and four rows high: as many sums at once as keep the processor busy. */
typedef REAL Vector __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
#define WIDE (32 / (long)sizeof(REAL))
#define PANEL (2 * WIDE)
#define ROWS 4

/* A matrix [depth, columns] cut into panels of PANEL columns, each contiguous, padded with zeros. */
typedef struct {
    REAL *panels;
    long depth, columns;
} Packed;

static Packed pack(const REAL *a, long depth, long columns, long row_stride, long column_stride) {
    long n = (columns + PANEL - 1) / PANEL;
    Packed p = {calloc((size_t)(n * depth * PANEL), sizeof(REAL)), depth, columns};
    for (long k = 0; k < depth; k++)
        for (long j = 0; j < columns; j++)
            p.panels[(j / PANEL * depth + k) * PANEL + j % PANEL] =
                a[k * row_stride + j * column_stride];
    return p;
}

/* c[i, :] = a[i, :] p + bias + residual[i, :], the latter two where given; relu where wanted. */
static void product(
    const REAL *a, long a_stride, const Packed *p, long rows, const REAL *bias,
    const REAL *residual, REAL *c, long c_stride, int relu
) {
    for (long j = 0; j < p->columns; j += PANEL) {
        const REAL *panel = p->panels + j * p->depth;
        long used = p->columns - j < PANEL ? p->columns - j : PANEL;
        for (long i = 0; i < rows; i += ROWS) {
            REAL sum[ROWS][PANEL];
            const REAL *r0 = a + i * a_stride, *r1 = r0 + (i + 1 < rows ? a_stride : 0),
                       *r2 = r1 + (i + 2 < rows ? a_stride : 0),
                       *r3 = r2 + (i + 3 < rows ? a_stride : 0);
            Vector s00 = {0}, s01 = {0}, s10 = {0}, s11 = {0}, s20 = {0}, s21 = {0}, s30 = {0},
                   s31 = {0};
            for (long k = 0; k < p->depth; k++) {
                Vector w0 = *(const Vector *)(panel + k * PANEL);
                Vector w1 = *(const Vector *)(panel + k * PANEL + WIDE);
                s00 += r0[k] * w0, s01 += r0[k] * w1;
                s10 += r1[k] * w0, s11 += r1[k] * w1;
                s20 += r2[k] * w0, s21 += r2[k] * w1;
                s30 += r3[k] * w0, s31 += r3[k] * w1;
            }
            Vector *at = (Vector *)sum[0];
            at[0] = s00, at[1] = s01, at[2] = s10, at[3] = s11;
            at[4] = s20, at[5] = s21, at[6] = s30, at[7] = s31;
            for (long r = 0; r < ROWS && i + r < rows; r++) {
                REAL *out = c + (i + r) * c_stride + j;
                for (long u = 0; u < used; u++) {
                    REAL x = sum[r][u];
                    if (bias) x += bias[j + u];
                    if (residual) x += residual[(i + r) * p->columns + j + u];
                    out[u] = relu && x < 0 ? 0 : x;
                }
            }
        }
    }
}

/* ----- Norm and activation */

static void normalise(
    const REAL *x, REAL *z, REAL *mean, REAL *rstd, long rows, long size, double eps
) {
    for (long i = 0; i < rows; i++, x += size, z += size) {
        REAL m = 0, v = 0;
        for (long d = 0; d < size; d++) m += x[d];
        m /= size;
        for (long d = 0; d < size; d++) v += (x[d] - m) * (x[d] - m);
        REAL r = 1 / sqrt(v / size + eps);
        for (long d = 0; d < size; d++) z[d] = (x[d] - m) * r;
        mean[i] = m;
        rstd[i] = r;
    }
}

static void gelu(const REAL *x, REAL *out, long n) {
    for (long i = 0; i < n; i++) out[i] = x[i] * (REAL)(0.5 * (1 + erf(x[i] * M_SQRT1_2)));
}
