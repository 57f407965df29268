/* Kernels that the compiled loops share. REAL is float or double. */

/* glibc declares its vector exp and erf only under this macro. They keep NaN, unlike what it promises. */
#ifndef __FAST_MATH__
#define __FAST_MATH__ 1
#endif

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "export.h"

#ifndef REAL
#define REAL float
#endif

/* ----- Products of few rows with a fixed matrix */

typedef REAL Vector __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
#define WIDE (32 / (int64_t)sizeof(REAL))
#define PANEL (2 * WIDE)
#define INLINE static inline __attribute__((always_inline))

/* Otherwise the compiler loads it again for every use. */
#ifdef __AVX__
#define KEEP(vector) __asm__("" : "+x"(vector))
#else
#define KEEP(vector)
#endif

/* A number of a fixed matrix: a REAL or, at half its size, a bfloat16, the upper half of a float. Sums are
   of REAL either way. */
#ifdef BFLOAT16
typedef unsigned short Weight;
typedef unsigned int Pairs __attribute__((vector_size(32), aligned(2), may_alias));
/* Column j of a panel shares 32 bits with the one a vector further: a shift and a mask take them apart. */
#define PLACE(j) ((j) % WIDE * 2 + (((j) / WIDE) ^ (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__)))
INLINE void load(const Weight *row, Vector *first, Vector *second) {
    Pairs pairs = *(const Pairs *)row;
    *first = (Vector)(pairs << 16);
    *second = (Vector)(pairs & 0xffff0000u);
}
/* To nearest, ties to even; NaN stays NaN. */
static Weight weight(float x) {
    unsigned int bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
typedef REAL Weight;
#define PLACE(j) (j)
INLINE void load(const Weight *row, Vector *first, Vector *second) {
    *first = *(const Vector *)row;
    *second = *(const Vector *)(row + WIDE);
}
static Weight weight(REAL x) { return x; }
#endif

/* A matrix [depth, columns] cut into panels of PANEL columns, each contiguous, padded with zeros. */
typedef struct {
    Weight *panels;
    int64_t depth, columns;
} Packed;

/* Null panels if out of memory. */
static Packed pack(
    const REAL *a, int64_t depth, int64_t columns, int64_t row_stride, int64_t column_stride
) {
    int64_t n = (columns + PANEL - 1) / PANEL;
    Packed p = {calloc((size_t)(n * depth * PANEL), sizeof(Weight)), depth, columns};
    for (int64_t k = 0; p.panels && k < depth; k++)
        for (int64_t j = 0; j < columns; j++)
            p.panels[(j / PANEL * depth + k) * PANEL + PLACE(j % PANEL)] =
                weight(a[k * row_stride + j * column_stride]);
    return p;
}

/* sum[r, :] = a[r, :] times adjacent panels, each two vectors wide: rows * panels, six at most, are
   enough independent sums to keep the processor busy. */
INLINE void few_rows(
    const REAL *a, int64_t a_stride, const Weight *panel, int64_t depth, REAL *sum, const int64_t rows,
    const int64_t panels
) {
    Vector s[6][2] = {0};
    for (int64_t k = 0; k < depth; k++)
        for (int64_t u = 0; u < panels; u++) {
            Vector w0, w1;
            load(panel + (u * depth + k) * PANEL, &w0, &w1);
            KEEP(w0);
            KEEP(w1);
            for (int64_t r = 0; r < rows; r++) {
                REAL x = a[r * a_stride + k];
                s[r * panels + u][0] += x * w0, s[r * panels + u][1] += x * w1;
            }
        }
    memcpy(sum, s, rows * panels * PANEL * sizeof(REAL));
}

/* c[i, :] = a[i, :] p + bias + residual[i, :], bias and residual unless null, then relu if set. */
static void product(
    const REAL *a, int64_t a_stride, const Packed *p, int64_t rows, const REAL *bias,
    const REAL *residual, REAL *c, int64_t c_stride, int relu
) {
    for (int64_t j = 0, width; j < p->columns; j += width) {
        const Weight *panel = p->panels + j * p->depth;
        int64_t depth = p->depth, left = p->columns - j, panels = rows == 1 ? 4 : rows <= 3 ? 2 : 1;
        if (left <= (panels - 1) * PANEL) panels = 1;
        width = panels * PANEL;
        int64_t used = left < width ? left : width;
        for (int64_t i = 0, n; i < rows; i += n) {
            REAL sum[6 * PANEL];
            const REAL *from = a + i * a_stride;
            n = rows - i;
            if (n > 6) n = n > 8 ? 6 : 4;
            /* Constants, for each of which the compiler unrolls its loops. */
            switch (10 * n + panels) {
                case 61: few_rows(from, a_stride, panel, depth, sum, 6, 1); break;
                case 51: few_rows(from, a_stride, panel, depth, sum, 5, 1); break;
                case 41: few_rows(from, a_stride, panel, depth, sum, 4, 1); break;
                case 32: few_rows(from, a_stride, panel, depth, sum, 3, 2); break;
                case 31: few_rows(from, a_stride, panel, depth, sum, 3, 1); break;
                case 22: few_rows(from, a_stride, panel, depth, sum, 2, 2); break;
                case 21: few_rows(from, a_stride, panel, depth, sum, 2, 1); break;
                case 14: few_rows(from, a_stride, panel, depth, sum, 1, 4); break;
                default: few_rows(from, a_stride, panel, depth, sum, 1, 1);
            }
            for (int64_t r = 0; r < n; r++) {
                REAL *out = c + (i + r) * c_stride + j;
                for (int64_t u = 0; u < used; u++) {
                    REAL x = sum[r * width + u];
                    if (bias) x += bias[j + u];
                    if (residual) x += residual[(i + r) * p->columns + j + u];
                    /* NaN is not below 0, so it stays. */
                    out[u] = relu && x < 0 ? 0 : x;
                }
            }
        }
    }
}

/* ----- Attention of one row's head: sums over a matrix m [rows, columns], stride apart */

/* out[j] += sum_k a[k] m[k, j] */
INLINE void add_rows(
    REAL *restrict out, const REAL *restrict a, const REAL *restrict m, int64_t stride, int64_t rows,
    int64_t columns
) {
    int64_t j = 0;
    for (; j + 4 * WIDE <= columns; j += 4 * WIDE) {
        Vector *o = (Vector *)(out + j), s0 = o[0], s1 = o[1], s2 = o[2], s3 = o[3];
        for (int64_t k = 0; k < rows; k++) {
            const Vector *v = (const Vector *)(m + k * stride + j);
            s0 += a[k] * v[0], s1 += a[k] * v[1], s2 += a[k] * v[2], s3 += a[k] * v[3];
        }
        o[0] = s0, o[1] = s1, o[2] = s2, o[3] = s3;
    }
    for (int64_t k = 0; j < columns && k < rows; k++)
        for (int64_t u = j; u < columns; u++) out[u] += a[k] * m[k * stride + u];
}

/* out[k] += sum_j w[j] m[k, j] */
INLINE void add_dots(
    REAL *restrict out, const REAL *restrict w, const REAL *restrict m, int64_t stride, int64_t rows,
    int64_t columns
) {
    for (int64_t k = 0; k < rows; k++) {
        REAL sum = 0;
        for (int64_t j = 0; j < columns; j++) sum += w[j] * m[k * stride + j];
        out[k] += sum;
    }
}

INLINE REAL dot(const REAL *restrict a, const REAL *restrict b, int64_t size) {
    REAL s = 0;
    for (int64_t c = 0; c < size; c++) s += a[c] * b[c];
    return s;
}

/* The maximum, taken in WIDE lanes, may miss NaN; the exponential and the sum keep it. */
static inline void softmax(REAL *s, int64_t n) {
    REAL high[WIDE], highest = s[0], sum = 0;
    int64_t j = 0;
    for (int64_t u = 0; u < WIDE; u++) high[u] = highest;
    for (; j + WIDE <= n; j += WIDE)
        for (int64_t u = 0; u < WIDE; u++) high[u] = s[j + u] > high[u] ? s[j + u] : high[u];
    for (; j < n; j++) highest = s[j] > highest ? s[j] : highest;
    for (int64_t u = 0; u < WIDE; u++) highest = high[u] > highest ? high[u] : highest;
    for (int64_t j = 0; j < n; j++) s[j] = sizeof(REAL) == 4 ? expf(s[j] - highest) : exp(s[j] - highest);
    for (int64_t j = 0; j < n; j++) sum += s[j];
    for (int64_t j = 0; j < n; j++) s[j] /= sum;
}

/* ----- Norm and activations */

INLINE REAL exponential(REAL x) { return sizeof(REAL) == 4 ? expf(x) : exp(x); }
INLINE REAL sigmoid(REAL x) { return 1 / (1 + exponential(-x)); }

static void normalise(
    const REAL *x, REAL *z, REAL *mean, REAL *rstd, int64_t rows, int64_t size, double eps
) {
    for (int64_t i = 0; i < rows; i++, x += size, z += size) {
        REAL m = 0, v = 0;
        for (int64_t d = 0; d < size; d++) m += x[d];
        m /= size;
        for (int64_t d = 0; d < size; d++) v += (x[d] - m) * (x[d] - m);
        REAL r = 1 / sqrt(v / size + eps);
        for (int64_t d = 0; d < size; d++) z[d] = (x[d] - m) * r;
        mean[i] = m;
        rstd[i] = r;
    }
}

static void gelu(const REAL *x, REAL *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * (REAL)(0.5 * (1 + erf(x[i] * 0.7071067811865476)));
}
