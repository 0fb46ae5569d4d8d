/* The kernels where pixels are adjacent, after bits_rows.h. */

/* 32 bits of channels for some vectors of pixels, which stay in registers. */
INLINE TARGET void NAME(half)(const Pass *pass, int64_t at, int64_t channels, int vectors, int count, int32_t *halves,
                              int32_t *more, int operation, int type) {
    Ints a[VECTORS], b[VECTORS]; /* signs or codes, or passes if there are no signs; and passes beside signs */
    const int bits = operation == PACK_CODES || operation == UNPACK_CODES ? (int)pass->bits : 1;
    const int size = type == IS_FLOAT32 ? 4 : type == IS_BFLOAT16 ? 2 : 1;
    const int unpacks = operation == UNPACK_SIGNS || operation == UNPACK_CODES;
    const Ints code = (Ints){0} + ((1 << bits) - 1);
    Ints place = (Ints){0} + 1;
    for (int v = 0; v < vectors; v++) {
        a[v] = b[v] = (Ints){0};
        if (unpacks || operation == WHERE_PASSES) memcpy(&a[v], halves + v * LANES, sizeof a[v]);
    }
#pragma GCC unroll 1
    for (int64_t c = 0; c < channels; c++, at += pass->pixels) {
        for (int v = 0; v < vectors; v++) {
            const int64_t here = at + v * LANES;
            if (vectors > 1 && !unpacks && v * LANES * size % 64 == 0) /* no machine foresees such steps */
                __builtin_prefetch((const char *)pass->input + (here + vectors * LANES) * size);
            if (operation == UNPACK_SIGNS) {
                NAME(save)(pass->output, here, type, NAME(sign)((a[v] & place) != 0, type), count);
                continue;
            }
            if (operation == UNPACK_CODES) {
                NAME(save)(pass->output, here, type, NAME(value)(a[v] & code, type), count);
                a[v] = (Ints)((NAME(Words))a[v] >> bits);
                continue;
            }
            const Ints x = NAME(load)(pass->input, here, type, count);
            if (operation == WHERE_PASSES) {
                NAME(save)(pass->output, here, type, x & ((a[v] & place) != 0), count);
                continue;
            }
            if (operation == PACK_CODES) a[v] |= NAME(number)(x, type) << (int)c * bits;
            if (operation == PACK_SIGNS || operation == PACK_BOTH) a[v] |= (Ints)((Floats)x < 0) & place;
            if (operation == PACK_PASSES || operation == PACK_BOTH || operation == CLAMP) {
                const Ints stopped = (Ints)((Floats)x <= pass->low) | (Ints)((Floats)x >= pass->high);
                if (operation == PACK_BOTH)
                    b[v] |= ~stopped & place;
                else
                    a[v] |= ~stopped & place;
            }
            if (operation == CLAMP)
                NAME(save)(pass->output, here, type, NAME(clamped)(x, pass->low, pass->high), count);
        }
        place <<= 1;
    }
    if (unpacks || operation == WHERE_PASSES) return;
    for (int v = 0; v < vectors; v++) {
        memcpy(halves + v * LANES, &a[v], sizeof a[v]);
        if (operation == PACK_BOTH) memcpy(more + v * LANES, &b[v], sizeof b[v]);
    }
}
/* The word of some channels, for as many pixels as vectors hold. Returns whether a pass is 0. */
INLINE TARGET int NAME(block)(const Pass *pass, int64_t at, int64_t channels, int64_t place, int vectors, int count,
                              int operation, int type) {
    const int unpacks = operation == UNPACK_SIGNS || operation == UNPACK_CODES || operation == WHERE_PASSES;
    const int is_code = operation == PACK_CODES || operation == UNPACK_CODES;
    const int64_t share = 32 / (is_code ? pass->bits : 1), pixels = vectors == 1 ? count : vectors * LANES;
    const int64_t left = pass->row_bytes - place % pass->row_bytes;
    const size_t bytes = is_code && left < 8 ? (size_t)left : 8;
    const int own = operation == PACK_PASSES || operation == CLAMP || operation == WHERE_PASSES;
    uint8_t *packed = (own ? pass->passes : pass->signs) + place;
    int32_t halves[2][VECTORS * LANES], more[2][VECTORS * LANES];
    for (int i = 0; i < 2; i++) {
        memset(halves[i], 0, (size_t)(vectors * LANES) * 4);
        memset(more[i], 0, (size_t)(vectors * LANES) * 4);
    }
    if (unpacks)
        for (int64_t p = 0; p < pixels; p++) {
            uint64_t word = 0;
            if (bytes == 8)
                memcpy(&word, packed + p * pass->row_bytes, 8);
            else
                memcpy(&word, packed + p * pass->row_bytes, bytes);
            halves[0][p] = (int32_t)word;
            halves[1][p] = (int32_t)(word >> 32);
        }
    const int64_t first = channels < share ? channels : share;
    NAME(half)(pass, at, first, vectors, count, halves[0], more[0], operation, type);
    NAME(half)(pass, at + first * pass->pixels, channels - first, vectors, count, halves[1], more[1], operation, type);
    if (unpacks) return 0;
    uint64_t all = ~(uint64_t)0;
    for (int64_t p = 0; p < pixels; p++) {
        const uint64_t word = (uint32_t)halves[0][p] | (uint64_t)(uint32_t)halves[1][p] << 32;
        if (bytes == 8)
            memcpy(packed + p * pass->row_bytes, &word, 8);
        else
            memcpy(packed + p * pass->row_bytes, &word, bytes);
        all &= word;
    }
    if (operation == PACK_BOTH) {
        all = ~(uint64_t)0;
        for (int64_t p = 0; p < pixels; p++) {
            const uint64_t word = (uint32_t)more[0][p] | (uint64_t)(uint32_t)more[1][p] << 32;
            memcpy(pass->passes + place + p * pass->row_bytes, &word, 8);
            all &= word;
        }
    }
    return (own || operation == PACK_BOTH) && (~all & ~(uint64_t)0 >> (WORD - channels)) != 0;
}
INLINE TARGET void NAME(planes)(const Pass *pass, int64_t start, int64_t stop, int operation, int type) {
    const int is_code = operation == PACK_CODES || operation == UNPACK_CODES;
    const int64_t share = WORD / (is_code ? pass->bits : 1);
    int stops = 0;
    for (int64_t part = start; part < stop; part++) {
        const int64_t index = part / pass->strips, strip = part % pass->strips, word = index % pass->words;
        const int64_t group = index / pass->words % pass->groups, image = index / pass->words / pass->groups;
        const int64_t left = pass->channels - word * share, channels = left < share ? left : share;
        const int64_t channel = (image * pass->groups + group) * pass->channels + word * share;
        const int64_t end = strip * STRIP + STRIP < pass->pixels ? strip * STRIP + STRIP : pass->pixels;
        int64_t p = strip * STRIP, at = channel * pass->pixels + p;
        int64_t place = (image * pass->pixels + p) * pass->row_bytes + (group * pass->words + word) * 8;
#define BLOCK(vectors, count)                                                                                         \
    do {                                                                                                              \
        const int pixels = (vectors) == 1 ? (count) : (vectors) * LANES;                                              \
        stops |= NAME(block)(pass, at, channels, place, vectors, count, operation, type);                             \
        p += pixels, at += pixels, place += pixels * pass->row_bytes;                                                 \
    } while (0)
        while (p + VECTORS * LANES <= end) BLOCK(VECTORS, LANES);
        while (p + LANES <= end) BLOCK(1, LANES);
        if (p < end) BLOCK(1, (int)(end - p));
#undef BLOCK
    }
    if (stops) __atomic_store_n(pass->stops, 1, __ATOMIC_RELAXED);
}

static TARGET void NAME(share)(const Pass *given, int64_t start, int64_t stop) {
    const Pass own = *given, *pass = &own; /* which the bytes that are written cannot be a part of */
#define CASE(operation, type)                                                                                         \
    case operation * 4 + type:                                                                                        \
        if (!pass->channels_last)                                                                                     \
            NAME(planes)(pass, start, stop, operation, type);                                                         \
        else if (operation == PACK_CODES || operation == UNPACK_CODES)                                                \
            NAME(code_rows)(pass, start, stop, operation, type);                                                      \
        else                                                                                                          \
            NAME(rows)(pass, start, stop, operation, type);                                                           \
        break;
#define FLOATS(operation) CASE(operation, IS_FLOAT32) CASE(operation, IS_BFLOAT16)
    switch (pass->operation * 4 + pass->type) {
        FLOATS(PACK_SIGNS)
        FLOATS(PACK_PASSES)
        FLOATS(PACK_BOTH)
        FLOATS(CLAMP)
        FLOATS(WHERE_PASSES)
        FLOATS(UNPACK_SIGNS)
        FLOATS(PACK_CODES)
        FLOATS(UNPACK_CODES)
        CASE(UNPACK_SIGNS, IS_BYTE)
        CASE(PACK_CODES, IS_BYTE)
        CASE(UNPACK_CODES, IS_BYTE)
    }
#undef CASE
#undef FLOATS
}

#undef NAME
#undef TARGET
#undef PLACES
#undef Ints
#undef Floats
#undef LANES
