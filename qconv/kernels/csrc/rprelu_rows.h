/* The passes of rprelu.c, included once for each instruction set with NAME and TARGET: loops over channels, of which
 * the compiler makes vectors. A channel is computed alone, so that no size of a vector changes a result. */

static TARGET void NAME(forward)(const RPReLU *r, int64_t start, int64_t stop) {
    const int64_t channels = r->channels;
    const float *before = r->before, *slope = r->slope, *after = r->after;
    for (int64_t row = start; row < stop; row++) {
        const float *x = r->input + row * channels;
        float *out = r->output + row * channels;
#pragma GCC ivdep
        for (int64_t c = 0; c < channels; c++) {
            const float v = x[c] + before[c], sloped = v * slope[c];
            out[c] = positive(v, v, sloped) + after[c];
        }
    }
}

/* Up to AT_ONCE rows: their gradients, which are added to the sums. */
INLINE TARGET void NAME(backward_rows)(const RPReLU *r, int64_t row, float *sum, int rows) {
    const int64_t channels = r->channels;
    const float *before = r->before, *slope = r->slope, *g = r->grad + row * channels, *x = r->input + row * channels;
    float *out = r->output + row * channels;
#pragma GCC ivdep
    for (int64_t c = 0; c < channels; c++) {
        float of_before = sum[c], of_slope = sum[channels + c], of_after = sum[2 * channels + c];
        const float b = before[c], s = slope[c];
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            const float grad = g[i * channels + c], v = x[i * channels + c] + b, sloped = grad * s, product = v * grad;
            const float passed = positive(v, grad, sloped);
            out[i * channels + c] = passed;
            of_before += passed;
            of_slope += positive(v, 0, product);
            of_after += grad;
        }
        sum[c] = of_before;
        sum[channels + c] = of_slope;
        sum[2 * channels + c] = of_after;
    }
}

/* Adds up rows, in float32 for a block of them and in float64 over blocks. */
static TARGET void NAME(backward)(const RPReLU *r, int64_t start, int64_t stop) {
    const int64_t numbers = 3 * r->channels;
    for (int64_t chunk = start; chunk < stop; chunk++) {
        float *sum = r->sums + chunk * numbers;
        double *total = r->totals + chunk * numbers;
        const int64_t end = r->rows * (chunk + 1) / r->chunks;
        int64_t row = r->rows * chunk / r->chunks;
        while (row < end) {
            const int64_t last = row + BLOCK < end ? row + BLOCK : end;
            memset(sum, 0, (size_t)numbers * sizeof *sum);
            for (; row + AT_ONCE <= last; row += AT_ONCE) NAME(backward_rows)(r, row, sum, AT_ONCE);
            for (; row < last; row++) NAME(backward_rows)(r, row, sum, 1);
#pragma GCC ivdep
            for (int64_t i = 0; i < numbers; i++) total[i] += sum[i];
        }
    }
}
