/* The loops of levels.c, included once for each instruction set with NAME and TARGET; the compiler makes vectors of
 * them. An element is computed alone, so that no size of a vector changes a result. */

static TARGET int NAME(round_codes)(const Levels *of, const float *input, float divisor, uint8_t *codes,
                                    int64_t count) {
    const float low = of->low, high = of->high, factor = of->factor;
    const uint32_t offset = (uint32_t)of->offset;
    uint32_t unordered = 0;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) {
        const float level = clamped(input[i] / divisor, low, high) * factor;
        unordered |= level != level;
        codes[i] = (uint8_t)(bits_of(level + ROUNDS) + offset);
    }
    return unordered != 0;
}

static TARGET void NAME(step_backward)(const Levels *of, const float *grad, const float *input, float divisor,
                                       float *output, float *terms, int64_t count) {
    const float low = of->low, high = of->high;
    const float strict = of->strict ? 1.0f : 0.0f, loose = 1 - strict;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) {
        const float z = input[i] / divisor, level = clamped(z, low, high);
        const float between = (z > low) & (z < high) ? 1.0f : 0.0f;
        const float passes = level == z ? loose + between * strict : 0.0f;
        terms[i] = grad[i] * ((level + ROUNDS) - ROUNDS - level * between);
        output[i] = grad[i] * passes;
    }
}

static TARGET void NAME(pass)(const Levels *of, int64_t start, int64_t stop) {
    while (start < stop) {
        const int64_t row = start / of->length, end = (row + 1) * of->length;
        const int64_t count = (stop < end ? stop : end) - start;
        const float divisor = of->divisors[row];
        if (of->operation == STEP_BACKWARD)
            NAME(step_backward)(of, of->grad + start, of->input + start, divisor, (float *)of->output + start,
                                of->terms + start, count);
        else if (NAME(round_codes)(of, of->input + start, divisor, (uint8_t *)of->output + start, count))
            __atomic_store_n(of->is_nan, 1, __ATOMIC_RELAXED); /* of several threads */
        start += count;
    }
}
