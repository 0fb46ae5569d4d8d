/* The backward of batch normalization in training, where channels are adjacent in memory: two passes.
 *
 * With d = Σ grad and p = Σ grad (input - mean) over the rows of a channel, grad_bias is d, grad_weight is p invstd,
 * and grad_input is (grad - d / rows - (input - mean) p invstd² / rows) invstd weight. The rows are added up in chunks
 * that depend on the shape alone, and chunks in their order: the sums are the same for any number of threads.
 */
#include "norm.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK = 64, AT_ONCE = 4, LEAST_ROWS = 128, MOST_CHUNKS = 64 };

#define ROWS "norm_rows.h"
#include "each_isa.h"
DISPATCH(Norm, add_up, portable)
DISPATCH(Norm, finish, portable)

static void combine(const Norm *norm) {
    const int64_t channels = norm->channels;
    const double rows = (double)norm->rows;
    for (int64_t c = 0; c < channels; c++) {
        double sum = 0, product = 0;
        for (int64_t chunk = 0; chunk < norm->chunks; chunk++) {
            sum += norm->totals[chunk * 2 * channels + c];
            product += norm->totals[(chunk * 2 + 1) * channels + c];
        }
        const double invstd = norm->invstd[c], weight = norm->weight == NULL ? 1 : norm->weight[c];
        norm->grad_bias[c] = (float)sum;
        norm->grad_weight[c] = (float)(product * invstd);
        norm->factors[c] = (float)(sum / rows);
        norm->factors[channels + c] = (float)(product * invstd * invstd / rows);
        norm->factors[2 * channels + c] = (float)(invstd * weight);
    }
}

int norm_backward(Norm *norm, ParallelFor parallel_for) {
    const int64_t chunks = norm->rows / LEAST_ROWS < MOST_CHUNKS ? norm->rows / LEAST_ROWS : MOST_CHUNKS;
    norm->chunks = chunks < 1 ? 1 : chunks;
    const size_t numbers = (size_t)(norm->chunks * 2 * norm->channels), factors = (size_t)(3 * norm->channels);
    int failed = 0;
    norm->totals = calloc(numbers, sizeof *norm->totals);
    norm->sums = malloc((numbers + factors) * sizeof *norm->sums);
    if (norm->totals == NULL || norm->sums == NULL) {
        failed = 1;
    } else {
        const int64_t rows = norm->grain / norm->channels + 1, parts = rows * norm->chunks / norm->rows + 1;
        norm->factors = norm->sums + numbers;
        failed = share_out(parallel_for, norm->chunks, parts, add_up, norm);
        combine(norm);
        failed |= share_out(parallel_for, norm->rows, rows, finish, norm);
    }
    free(norm->sums);
    free(norm->totals);
    return failed;
}
