/* Vectors as wide as the processor's, and sums and transposes of as many of them as they have numbers. */

#ifdef __AVX512F__
#define BYTES 64
#define WIDEST 4 /* vectors of four sums each that registers hold */
#else
#define BYTES 32
#define WIDEST 2
#endif
#define LANES (BYTES / (int64_t)sizeof(REAL))

typedef REAL Lanes __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
typedef __typeof__((Lanes){0} < (Lanes){0}) Indices;

/* For transposing, which numbers of two vectors 1, 2, 4, ... rows apart make the first and the second of them
   anew. In memory, as the compiler would otherwise put them together for every use. */
static Indices low[4], high[4];
__attribute__((constructor)) static void fill_indices(void) {
    for (int64_t e = 0; e < LANES; e++)
        for (int64_t n = 0, step = 1; step < LANES; n++, step *= 2) {
            low[n][e] = e & step ? LANES + e - step : e;
            high[n][e] = e & step ? LANES + e : e + step;
        }
}

/* out[c, r] = in[r, c] */
static void transpose(
    REAL *out, int64_t out_stride, const REAL *in, int64_t in_stride, int64_t rows, int64_t columns
) {
    int64_t whole_rows = 0, whole_columns = columns / LANES * LANES;
#ifndef __clang__
    /* LANES rows at a time: elements change places with those 1, 2, 4, ... rows and columns away. */
    for (; whole_rows + LANES <= rows; whole_rows += LANES)
        for (int64_t c = 0; c < whole_columns; c += LANES) {
            Lanes x[LANES];
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++)
                x[i] = *(const Lanes *)(in + (whole_rows + i) * in_stride + c);
#pragma GCC unroll 4
            for (int64_t n = 0, step = 1; step < LANES; n++, step *= 2)
#pragma GCC unroll 16
                for (int64_t i = 0; i < LANES; i++)
                    if (!(i & step)) {
                        Lanes y = x[i];
                        x[i] = __builtin_shuffle(y, x[i + step], low[n]);
                        x[i + step] = __builtin_shuffle(y, x[i + step], high[n]);
                    }
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++) *(Lanes *)(out + (c + i) * out_stride + whole_rows) = x[i];
        }
#endif
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; c++)
            out[c * out_stride + r] = in[r * in_stride + c];
}

/* The sum of each row of in [LANES, LANES]. */
INLINE Lanes row_sums(const REAL *in) {
    Lanes x[LANES];
#ifndef __clang__
    memcpy(x, in, sizeof x);
#pragma GCC unroll 4
    for (int64_t n = 0, step = 1; step < LANES; n++, step *= 2)
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; i += 2 * step)
            x[i] = __builtin_shuffle(x[i], x[i + step], low[n]) + __builtin_shuffle(x[i], x[i + step], high[n]);
#else
    for (int64_t i = 0; i < LANES; i++) {
        x[0][i] = 0;
        for (int64_t e = 0; e < LANES; e++) x[0][i] += in[i * LANES + e];
    }
#endif
    return x[0];
}
