/* The kernels where channels are adjacent, over one instruction set: included once for each, before bits_planes.h, with
 * NAME, TARGET, PLACES (the bits of lanes), Ints, Floats, words, halves, bytes, to_words, to_halves, to_bytes,
 * negative, stopped and clamped. */
#define Ints NAME(Ints)
#define Floats NAME(Floats)
#define LANES ((int)(sizeof(Ints) / 4))
typedef uint32_t NAME(Words) __attribute__((vector_size(sizeof(Ints))));

/* Lanes of floats, as their bits, or of bytes. */
INLINE TARGET Ints NAME(load)(const void *from, int64_t at, int type, int count) {
    if (type == IS_FLOAT32) return NAME(words)((const uint32_t *)from + at, count);
    if (type == IS_BFLOAT16) return NAME(halves)((const uint16_t *)from + at, count);
    return NAME(bytes)((const uint8_t *)from + at, count);
}
INLINE TARGET void NAME(save)(void *to, int64_t at, int type, Ints x, int count) {
    if (type == IS_FLOAT32)
        NAME(to_words)((uint32_t *)to + at, x, count);
    else if (type == IS_BFLOAT16)
        NAME(to_halves)((uint16_t *)to + at, x, count);
    else
        NAME(to_bytes)((uint8_t *)to + at, x, count);
}
INLINE TARGET Ints NAME(sign)(Ints negative, int type) { /* of lanes that are -1 where the sign is */
    return type == IS_BYTE ? negative | 1 : (negative & INT32_MIN) | 0x3f800000;
}
INLINE TARGET Ints NAME(number)(Ints x, int type) {
    return type == IS_BYTE ? x : __builtin_convertvector((Floats)x, Ints);
}
INLINE TARGET Ints NAME(value)(Ints number, int type) {
    return type == IS_BYTE ? number : (Ints)__builtin_convertvector(number, Floats);
}

typedef struct { uint64_t signs, passes; } NAME(Word);
INLINE TARGET Ints NAME(lanes_of)(uint64_t bits) {
    const Ints places = PLACES, all = (Ints){0} + (int32_t)bits;
    return (all & places) == places;
}
INLINE TARGET void NAME(step)(const Pass *pass, int64_t at, int i, int count, NAME(Word) *word, int operation,
                              int type) {
    if (operation == UNPACK_SIGNS) {
        const Ints is = NAME(lanes_of)(word->signs >> i);
        NAME(save)(pass->output, at, type, NAME(sign)(is, type), count);
        return;
    }
    Ints x = NAME(load)(pass->input, at, type, count);
    if (operation == WHERE_PASSES) {
        const Ints is = NAME(lanes_of)(word->passes >> i);
        NAME(save)(pass->output, at, type, x & is, count);
        return;
    }
    if (operation != PACK_SIGNS) {
        const uint32_t bits = ~NAME(stopped)(x, pass->low, pass->high) & (uint32_t)((1u << count) - 1);
        word->passes |= (uint64_t)bits << i;
    }
    if (operation == CLAMP) NAME(save)(pass->output, at, type, NAME(clamped)(x, pass->low, pass->high), count);
    /* Lanes beyond count are 0, which is not below 0. */
    if (operation <= PACK_BOTH && operation != PACK_PASSES)
        word->signs |= (uint64_t)NAME(negative)(x) << i;
}
INLINE TARGET int NAME(word)(const Pass *pass, int64_t at, int count, int64_t place, int operation, int type) {
    NAME(Word) word = {0, 0};
    if (operation == UNPACK_SIGNS) memcpy(&word.signs, pass->signs + place, 8);
    if (operation == WHERE_PASSES) memcpy(&word.passes, pass->passes + place, 8);
    int i = 0;
    for (; i + LANES <= count; i += LANES) NAME(step)(pass, at + i, i, LANES, &word, operation, type);
    if (i < count) NAME(step)(pass, at + i, i, count - i, &word, operation, type);
    if (operation == PACK_SIGNS || operation == PACK_BOTH) memcpy(pass->signs + place, &word.signs, 8);
    if (operation < PACK_PASSES || operation > CLAMP) return 0;
    memcpy(pass->passes + place, &word.passes, 8);
    return word.passes != ~(uint64_t)0 >> (WORD - count);
}
INLINE TARGET int NAME(words_of)(const Pass *pass, int64_t start, int64_t stop, int count, int operation, int type) {
    int stops = 0;
    for (int64_t word = start; word < stop; word++)
        stops |= NAME(word)(pass, word * count, count, word * 8, operation, type);
    return stops;
}
INLINE TARGET void NAME(rows)(const Pass *pass, int64_t start, int64_t stop, int operation, int type) {
    int stops = 0;
    const int64_t channels = pass->channels;
    start *= pass->groups;
    stop *= pass->groups;
    if (channels % WORD == 0) { /* the sizes that are most common are known when they are compiled */
        stops = NAME(words_of)(pass, start * pass->words, stop * pass->words, WORD, operation, type);
    } else if (channels == 32) {
        stops = NAME(words_of)(pass, start, stop, 32, operation, type);
    } else if (channels == 16) {
        stops = NAME(words_of)(pass, start, stop, 16, operation, type);
    } else {
        int64_t at = start * channels, place = start * pass->words * 8;
        for (; start < stop; start++) {
            const int64_t end = at + channels;
            for (; at + WORD <= end; at += WORD, place += 8)
                stops |= NAME(word)(pass, at, WORD, place, operation, type);
            stops |= NAME(word)(pass, at, (int)(end - at), place, operation, type);
            at = end;
            place += 8;
        }
    }
    if (stops) __atomic_store_n(pass->stops, 1, __ATOMIC_RELAXED);
}

/* Blocks of codes as bytes, whose loops the compiler makes vectors of: 8 codes are `bits` bytes. */
#define EACH_EIGHT(type, statement)                                                                                   \
    for (int64_t j = 0; j < whole; j++) {                                                                             \
        type some;                                                                                                    \
        statement                                                                                                     \
    }
INLINE TARGET void NAME(pack_block)(const Pass *pass, int64_t at, int count, uint8_t *to, const Squeeze *squeeze,
                                    int type) {
    const int64_t bits = pass->bits, eights = (count + 7) / 8, whole = count / 8;
    uint64_t block[EIGHTS];
    int i = 0;
    block[eights - 1] = 0;
    for (; i + LANES <= count; i += LANES) {
        const Ints x = NAME(load)(pass->input, at + i, type, LANES);
        NAME(to_bytes)((uint8_t *)block + i, NAME(number)(x, type), LANES);
    }
    if (i < count) {
        const Ints x = NAME(load)(pass->input, at + i, type, count - i);
        NAME(to_bytes)((uint8_t *)block + i, NAME(number)(x, type), count - i);
    }
    const Squeeze s = *squeeze;
    for (int64_t j = 0; j < eights; j++) {
        uint64_t x = block[j];
        x = (x | x >> s.shift[0]) & s.mask[1];
        x = (x | x >> s.shift[1]) & s.mask[2];
        block[j] = (x | x >> s.shift[2]) & s.mask[3];
    }
    switch (bits) {
    case 1: EACH_EIGHT(uint8_t, some = (uint8_t)block[j]; memcpy(to + j, &some, 1);) break;
    case 2: EACH_EIGHT(uint16_t, some = (uint16_t)block[j]; memcpy(to + 2 * j, &some, 2);) break;
    case 4: EACH_EIGHT(uint32_t, some = (uint32_t)block[j]; memcpy(to + 4 * j, &some, 4);) break;
    default: memcpy(to, block, (size_t)whole * 8);
    }
    if (eights > whole) memcpy(to + whole * bits, &block[whole], (size_t)((count - whole * 8) * bits + 7) / 8);
}
INLINE TARGET void NAME(unpack_block)(const Pass *pass, int64_t at, int count, const uint8_t *from,
                                      const Squeeze *squeeze, int type) {
    const int64_t bits = pass->bits, eights = (count + 7) / 8, whole = count / 8;
    uint64_t block[EIGHTS + 8];
    switch (bits) {
    case 1: EACH_EIGHT(uint8_t, memcpy(&some, from + j, 1); block[j] = some;) break;
    case 2: EACH_EIGHT(uint16_t, memcpy(&some, from + 2 * j, 2); block[j] = some;) break;
    case 4: EACH_EIGHT(uint32_t, memcpy(&some, from + 4 * j, 4); block[j] = some;) break;
    default: memcpy(block, from, (size_t)whole * 8);
    }
    if (eights > whole) {
        block[whole] = 0;
        memcpy(&block[whole], from + whole * bits, (size_t)((count - whole * 8) * bits + 7) / 8);
    }
    const Squeeze s = *squeeze;
    for (int64_t j = 0; j < eights; j++) {
        uint64_t x = block[j];
        x = (x | x << s.shift[2]) & s.mask[2];
        x = (x | x << s.shift[1]) & s.mask[1];
        block[j] = (x | x << s.shift[0]) & s.mask[0];
    }
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Ints x = NAME(bytes)((const uint8_t *)block + i, LANES);
        NAME(save)(pass->output, at + i, type, NAME(value)(x, type), LANES);
    }
    if (i < count) {
        const Ints x = NAME(bytes)((const uint8_t *)block + i, count - i);
        NAME(save)(pass->output, at + i, type, NAME(value)(x, type), count - i);
    }
}
#undef EACH_EIGHT
INLINE TARGET void NAME(code_rows)(const Pass *pass, int64_t start, int64_t stop, int operation, int type) {
    const Squeeze squeeze = squeeze_of(pass->bits);
    const int whole = pass->channels * pass->bits % 8 == 0; /* rows that end with a byte are as good as one */
    const int64_t step = whole ? stop - start : 1, most = EIGHTS * 8;
    for (int64_t row = start; row < stop; row += step) {
        const int64_t at = row * pass->channels, count = step * pass->channels;
        uint8_t *codes = pass->signs + row * pass->row_bytes;
        for (int64_t i = 0; i < count; i += most, codes += EIGHTS * pass->bits) {
            const int n = (int)(count - i < most ? count - i : most);
            if (operation == PACK_CODES)
                NAME(pack_block)(pass, at + i, n, codes, &squeeze, type);
            else
                NAME(unpack_block)(pass, at + i, n, codes, &squeeze, type);
        }
    }
}
