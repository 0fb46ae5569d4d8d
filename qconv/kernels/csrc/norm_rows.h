/* The passes of norm.c, included once for each instruction set with NAME and TARGET: loops over channels, of which the
 * compiler makes vectors. A channel is computed alone, so that no size of a vector changes a result. */

/* Adds up rows, in float32 for a block of them and in float64 over blocks. */
static TARGET void NAME(add_up)(const Norm *norm, int64_t start, int64_t stop) {
    const int64_t channels = norm->channels;
    const float *mean = norm->mean;
    for (int64_t chunk = start; chunk < stop; chunk++) {
        float *sum = norm->sums + chunk * 2 * channels, *product = sum + channels;
        double *total = norm->totals + chunk * 2 * channels;
        const int64_t end = norm->rows * (chunk + 1) / norm->chunks;
        int64_t row = norm->rows * chunk / norm->chunks;
        while (row < end) {
            const int64_t last = row + BLOCK < end ? row + BLOCK : end;
            memset(sum, 0, (size_t)(2 * channels) * sizeof *sum);
            for (; row + AT_ONCE <= last; row += AT_ONCE) {
                const float *g = norm->grad + row * channels, *x = norm->input + row * channels;
#pragma GCC ivdep
                for (int64_t c = 0; c < channels; c++) {
                    float s = sum[c], p = product[c], m = mean[c];
#pragma GCC unroll 4
                    for (int r = 0; r < AT_ONCE; r++) {
                        s += g[r * channels + c];
                        p += g[r * channels + c] * (x[r * channels + c] - m);
                    }
                    sum[c] = s;
                    product[c] = p;
                }
            }
            for (; row < last; row++) {
                const float *g = norm->grad + row * channels, *x = norm->input + row * channels;
#pragma GCC ivdep
                for (int64_t c = 0; c < channels; c++) {
                    sum[c] += g[c];
                    product[c] += g[c] * (x[c] - mean[c]);
                }
            }
#pragma GCC ivdep
            for (int64_t c = 0; c < 2 * channels; c++) total[c] += sum[c];
        }
    }
}

static TARGET void NAME(finish)(const Norm *norm, int64_t start, int64_t stop) {
    const int64_t channels = norm->channels;
    const float *mean = norm->mean, *shift = norm->factors, *slope = shift + channels, *scale = slope + channels;
    for (int64_t row = start; row < stop; row++) {
        const float *g = norm->grad + row * channels, *x = norm->input + row * channels;
        float *out = norm->grad_input + row * channels; /* may be x */
#pragma GCC ivdep
        for (int64_t c = 0; c < channels; c++) out[c] = (g[c] - shift[c] - (x[c] - mean[c]) * slope[c]) * scale[c];
    }
}
