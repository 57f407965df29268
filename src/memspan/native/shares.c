/* The shares of a loop, in threads of the OpenMP runtime that PyTorch uses. */

#include <stdint.h>

#include "export.h"

typedef int WithWeights(void *given, void *weights, int64_t first, int64_t end);
typedef int Alone(void *given, int64_t first, int64_t end);
/* GOMP_parallel: calls body(data) in each thread, and returns when all have returned. */
typedef void Parallel(void (*body)(void *), void *data, unsigned n_threads, unsigned flags);

typedef struct {
    void (*function)(void);
    void *given, *weights;
    int64_t total, n_shares, next;
    int out_of_memory;
} Loop;

/* Threads take turns at shares: there may be fewer of them. */
static void take_shares(void *data) {
    Loop *loop = data;
    for (;;) {
        int64_t n = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED);
        if (n >= loop->n_shares) return;
        int64_t first = loop->total * n / loop->n_shares;
        int64_t end = loop->total * (n + 1) / loop->n_shares;
        int done = loop->weights
            ? ((WithWeights *)loop->function)(loop->given, loop->weights, first, end)
            : ((Alone *)loop->function)(loop->given, first, end);
        if (!done) __atomic_store_n(&loop->out_of_memory, 1, __ATOMIC_RELAXED);
    }
}

/* Calls function(given, weights, first, end), without weights if they are null, for the shares of total
   items; in this thread alone where parallel is null. Returns 0 if one was out of memory. */
EXPORT int in_shares(
    Parallel *parallel, void (*function)(void), void *given, void *weights, int64_t total,
    int64_t n_shares
) {
    Loop loop = {function, given, weights, total, n_shares, 0, 0};
    if (parallel) parallel(take_shares, &loop, (unsigned)n_shares, 0);
    take_shares(&loop);
    return !loop.out_of_memory;
}
