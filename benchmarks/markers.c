/* What benchmarks/instructions.py counts begins with start() and ends with stop(). Outside valgrind both
   do nothing. */

#include <valgrind/callgrind.h>

void start(void) { CALLGRIND_START_INSTRUMENTATION; }

/* Writes what was counted under a name, and begins anew at 0. */
void stop(const char *name) {
    CALLGRIND_STOP_INSTRUMENTATION;
    CALLGRIND_DUMP_STATS_AT(name);
}
