/* The kernels over one instruction set: included once for each, with NAME, TARGET, LANES, ENTRIES, FOLD, ROWS, VECTORS,
 * Floats, Table, Choice and zero, load, store, choose, table, add, keep, some, tables and encode. */

#define WIDE (LANES * VECTORS) /* channels of a block of codes */

/* out[r] = the sums over all runs of table r of each step, looked up by the step's codes: rows × vectors of channels.
 * Both are known when it is inlined. With `more` they are added to `out`, which rounds less than going on from it. */
INLINE TARGET void NAME(tile)(const Run *run, int64_t runs, int64_t code_step, int64_t table_step, float *out, int more,
                              int rows, int vectors) {
    Floats sums[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = NAME(zero)();
    for (const Run *end = run + runs; run < end; run++) {
        const uint8_t *code = run->codes;
        const float *at = run->tables;
#pragma GCC unroll 1
        for (int64_t left = run->count; left > 0; left--, code += code_step, at += table_step) {
            Choice choice[VECTORS];
            for (int v = 0; v < vectors; v++) choice[v] = NAME(choose)(code + v * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const Table table = NAME(table)(at + r * ENTRIES);
                for (int v = 0; v < vectors; v++) sums[r][v] = NAME(add)(sums[r][v], table, choice[v]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            float *to = out + r * WIDE + v * LANES;
            if (more) sums[r][v] += NAME(load)(to);
            NAME(store)(to, sums[r][v]);
        }
}

static TARGET void NAME(sums)(const Run *run, int64_t runs, int64_t code_step, int64_t table_step, float *out, int more,
                              int rows, int vectors) {
#define CASE(rows)                                                                                                    \
    case rows:                                                                                                        \
        if (vectors == VECTORS)                                                                                       \
            NAME(tile)(run, runs, code_step, table_step, out, more, rows, VECTORS);                                   \
        else                                                                                                          \
            NAME(tile)(run, runs, code_step, table_step, out, more, rows, 1);                                         \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
#undef CASE
}

INLINE TARGET void NAME(widen)(const uint16_t *from, int64_t count, float *to) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) to[i] = widened(from[i]);
}

INLINE TARGET void NAME(narrow)(const float *from, int64_t count, uint16_t *to) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) to[i] = (uint16_t)rounded(from[i]);
}

#include "look_up_pixels.h"

#include "look_up_taps.h"

#undef WIDE
#undef NAME
#undef TARGET
#undef LANES
#undef ENTRIES
#undef FOLD
#undef ROWS
#undef VECTORS
#undef Floats
#undef Table
#undef Choice
