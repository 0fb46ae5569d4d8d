/* The loops of slopes.c, included once for each instruction set with NAME and TARGET; the compiler makes vectors of
 * them. An element is computed alone, so that no size of a vector changes a result. */

static TARGET void NAME(floats)(const float *grad, const float *input, float *output, int64_t count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) output[i] = grad[i] * above_zero(2 - 2 * fabsf(input[i]));
}

static TARGET void NAME(halves)(const uint16_t *grad, const uint16_t *input, uint16_t *output, int64_t count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) {
        const float slope = above_zero(widened(rounded(2 - 2 * fabsf(widened(input[i])))));
        output[i] = (uint16_t)rounded(widened(grad[i]) * slope);
    }
}

static TARGET void NAME(pass)(const Slope *slope, int64_t start, int64_t stop) {
    if (slope->type == SLOPE_FLOAT32)
        NAME(floats)((const float *)slope->grad + start, (const float *)slope->input + start,
                     (float *)slope->output + start, stop - start);
    else
        NAME(halves)((const uint16_t *)slope->grad + start, (const uint16_t *)slope->input + start,
                     (uint16_t *)slope->output + start, stop - start);
}
