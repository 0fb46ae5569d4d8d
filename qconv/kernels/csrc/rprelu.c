/* RPReLU, PReLU(x + before) + after, and its gradients, where channels are adjacent in memory: a pass over it each.
 *
 * The rows are added up in chunks that depend on the shape alone, and chunks in their order: the sums are the same for
 * any number of threads.
 */
#include "rprelu.h"

#include <stdlib.h>
#include <string.h>

/* `a` if v > 0, else `b`: of a choice between floats gcc would make a jump, which goes wrong half the time. */
INLINE float positive(float v, float a, float b) {
    const uint32_t mask = -(uint32_t)(v > 0);
    uint32_t of_a, of_b;
    memcpy(&of_a, &a, sizeof a);
    memcpy(&of_b, &b, sizeof b);
    of_a = (of_a & mask) | (of_b & ~mask);
    memcpy(&a, &of_a, sizeof a);
    return a;
}

enum { BLOCK = 64, AT_ONCE = 4, LEAST_ROWS = 128, MOST_CHUNKS = 64 };

#define ROWS "rprelu_rows.h"
#include "each_isa.h"
DISPATCH(RPReLU, forward, portable)
DISPATCH(RPReLU, backward, portable)

static void combine(const RPReLU *r) {
    float *const grads[] = {r->grad_before, r->grad_slope, r->grad_after};
    for (int64_t i = 0; i < 3 * r->channels; i++) {
        double sum = 0;
        for (int64_t chunk = 0; chunk < r->chunks; chunk++) sum += r->totals[chunk * 3 * r->channels + i];
        grads[i / r->channels][i % r->channels] = (float)sum;
    }
}

int rprelu(RPReLU *r, ParallelFor parallel_for) {
    const int64_t rows = r->grain / r->channels + 1;
    if (r->grad == NULL) return share_out(parallel_for, r->rows, rows, forward, r);
    const int64_t chunks = r->rows / LEAST_ROWS < MOST_CHUNKS ? r->rows / LEAST_ROWS : MOST_CHUNKS;
    r->chunks = chunks < 1 ? 1 : chunks;
    const int64_t parts = rows * r->chunks / r->rows + 1;
    const size_t numbers = (size_t)(r->chunks * 3 * r->channels);
    int failed = 0;
    r->totals = calloc(numbers, sizeof *r->totals);
    r->sums = malloc(numbers * sizeof *r->sums);
    if (r->totals == NULL || r->sums == NULL) {
        failed = 1;
    } else {
        failed = share_out(parallel_for, r->chunks, parts, backward, r);
        combine(r);
    }
    free(r->sums);
    free(r->totals);
    return failed;
}
