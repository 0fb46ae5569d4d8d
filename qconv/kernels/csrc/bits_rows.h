/* The kernels over one instruction set: included once for each, with NAME, TARGET, PLACES (of the lanes' bits), Ints,
 * Floats, words, halves, bytes, to_words, to_halves, to_bytes and bits. */
#define Ints NAME(Ints)
#define Floats NAME(Floats)
#define LANES ((int)(sizeof(Ints) / 4))

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
INLINE TARGET Ints NAME(either)(Ints is, Ints yes, Ints no) { return (yes & is) | (no & ~is); }
INLINE TARGET Ints NAME(stopped)(const Pass *pass, Ints x) {
    const Floats f = (Floats)x;
    return (Ints)(f <= pass->low) | (Ints)(f >= pass->high);
}
INLINE TARGET Ints NAME(clamped)(const Pass *pass, Ints x) { /* NaN stays, and zeros that are at a bound */
    const Floats low = pass->low - (Floats){0}, high = pass->high - (Floats){0};
    x = NAME(either)((Ints)((Floats)x < low), (Ints)low, x);
    return NAME(either)((Ints)((Floats)x > high), (Ints)high, x);
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

/* ---- adjacent channels ---- */
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
        const uint32_t bits = ~NAME(bits)(NAME(stopped)(pass, x)) & (uint32_t)((1u << count) - 1);
        word->passes |= (uint64_t)bits << i;
    }
    if (operation == CLAMP) NAME(save)(pass->output, at, type, NAME(clamped)(pass, x), count);
    /* Lanes beyond count are 0, which is not below 0. */
    if (operation <= PACK_BOTH && operation != PACK_PASSES)
        word->signs |= (uint64_t)NAME(bits)((Ints)((Floats)x < 0)) << i;
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
INLINE TARGET void NAME(rows)(const Pass *pass, int64_t start, int64_t stop, int operation, int type) {
    int stops = 0;
    const int64_t channels = pass->channels;
    int64_t at = start * pass->groups * channels, place = start * pass->row_bytes;
    for (int64_t part = start * pass->groups; part < stop * pass->groups; part++) {
        const int64_t end = at + channels;
        for (; at + WORD <= end; at += WORD, place += 8) stops |= NAME(word)(pass, at, WORD, place, operation, type);
        if (at < end) {
            stops |= NAME(word)(pass, at, (int)(end - at), place, operation, type);
            at = end;
            place += 8;
        }
    }
    if (stops) __atomic_store_n(pass->stops, 1, __ATOMIC_RELAXED);
}

/* 16 codes are 2 * bits bytes, of which a row's last ones may be fewer. */
INLINE TARGET void NAME(pack_row)(const Pass *pass, int64_t at, int64_t count, uint8_t *to, const Squeeze *squeeze,
                                  int type) {
    const int64_t bits = pass->bits;
    for (int64_t i = 0; i < count; i += 16) {
        uint64_t eights[2] = {0, 0};
        if (count - i >= 16) {
            for (int j = 0; j < 16; j += LANES)
                NAME(to_bytes)
                ((uint8_t *)eights + j, NAME(number)(NAME(load)(pass->input, at + i + j, type, LANES), type), LANES);
        } else {
            for (int64_t j = i; j < count; j++) {
                const Ints x = NAME(load)(pass->input, at + j, type, 1);
                ((uint8_t *)eights)[j - i] = (uint8_t)NAME(number)(x, type)[0];
            }
        }
        for (int j = 0; j < 2; j++) {
            const uint64_t packed = squeezed(eights[j], squeeze);
            const int64_t left = ((count - i - 8 * j) * bits + 7) / 8;
            if (left >= bits)
                switch (bits) {
                case 1: memcpy(to, &packed, 1); break;
                case 2: memcpy(to, &packed, 2); break;
                case 4: memcpy(to, &packed, 4); break;
                default: memcpy(to, &packed, 8);
                }
            else
                for (int64_t b = 0; b < left; b++) to[b] = (uint8_t)(packed >> 8 * b);
            to += bits;
        }
    }
}
INLINE TARGET void NAME(unpack_row)(const Pass *pass, int64_t at, int64_t count, const uint8_t *from,
                                    const Squeeze *squeeze, int type) {
    const int64_t bits = pass->bits;
    for (int64_t i = 0; i < count; i += 16) {
        uint64_t eights[2] = {0, 0};
        for (int j = 0; j < 2; j++) {
            const int64_t left = ((count - i - 8 * j) * bits + 7) / 8;
            uint64_t packed = 0;
            if (left >= bits)
                switch (bits) {
                case 1: memcpy(&packed, from, 1); break;
                case 2: memcpy(&packed, from, 2); break;
                case 4: memcpy(&packed, from, 4); break;
                default: memcpy(&packed, from, 8);
                }
            else
                for (int64_t b = 0; b < left; b++) packed |= (uint64_t)from[b] << 8 * b;
            eights[j] = spread(packed, squeeze);
            from += bits;
        }
        const int64_t left = count - i;
        for (int j = 0; j < 16 && j < left; j += LANES) {
            const Ints x = NAME(value)(NAME(bytes)((const uint8_t *)eights + j, LANES), type);
            if (left - j >= LANES)
                NAME(save)(pass->output, at + i + j, type, x, LANES);
            else
                NAME(save)(pass->output, at + i + j, type, x, (int)(left - j));
        }
    }
}
INLINE TARGET void NAME(code_rows)(const Pass *pass, int64_t start, int64_t stop, int operation, int type) {
    const Squeeze squeeze = squeeze_of(pass->bits);
    const int whole = pass->channels * pass->bits % 8 == 0; /* rows that end with a byte are as good as one */
    const int64_t step = whole ? stop - start : 1;
    for (int64_t row = start; row < stop; row += step) {
        const int64_t at = row * pass->channels, count = step * pass->channels;
        uint8_t *codes = pass->signs + row * pass->row_bytes;
        if (operation == PACK_CODES)
            NAME(pack_row)(pass, at, count, codes, &squeeze, type);
        else
            NAME(unpack_row)(pass, at, count, codes, &squeeze, type);
    }
}

/* ---- planes: strips of one word of the channels ---- */
typedef struct { int32_t signs[2][STRIP + 16], passes[2][STRIP + 16]; } NAME(Strip);
/* What a plane does to a vector of pixels: `bit` is the place of its bit, or code, in half a word. */
INLINE TARGET void NAME(visit)(const Pass *pass, int64_t at, int count, int bit, int32_t *signs, int32_t *passes,
                               int operation, int type) {
    const Ints place = (Ints){0} + (int32_t)(1u << bit);
    Ints sign, passing, x;
    memcpy(&sign, signs, sizeof sign);
    memcpy(&passing, passes, sizeof passing);
    if (operation == UNPACK_SIGNS) {
        NAME(save)(pass->output, at, type, NAME(sign)((sign & place) != 0, type), count);
        return;
    }
    if (operation == UNPACK_CODES) {
        x = (sign >> bit) & (int32_t)((1 << pass->bits) - 1);
        NAME(save)(pass->output, at, type, NAME(value)(x, type), count);
        return;
    }
    x = NAME(load)(pass->input, at, type, count);
    if (operation == WHERE_PASSES) {
        NAME(save)(pass->output, at, type, x & ((passing & place) != 0), count);
        return;
    }
    if (operation == PACK_CODES) {
        sign |= NAME(number)(x, type) << bit;
        memcpy(signs, &sign, sizeof sign);
        return;
    }
    if (operation != PACK_SIGNS) {
        passing |= ~NAME(stopped)(pass, x) & place;
        memcpy(passes, &passing, sizeof passing);
    }
    if (operation == CLAMP) NAME(save)(pass->output, at, type, NAME(clamped)(pass, x), count);
    if (operation == PACK_SIGNS || operation == PACK_BOTH) {
        sign |= (Ints)((Floats)x < 0) & place;
        memcpy(signs, &sign, sizeof sign);
    }
}
INLINE TARGET uint64_t NAME(gather)(const int32_t halves[2][STRIP + 16], int64_t p) {
    return (uint32_t)halves[0][p] | (uint64_t)(uint32_t)halves[1][p] << 32;
}
INLINE TARGET void NAME(planes)(const Pass *pass, int64_t start, int64_t stop, int operation, int type) {
    const int is_code = operation == PACK_CODES || operation == UNPACK_CODES;
    const int bits = is_code ? (int)pass->bits : 1, share = WORD / bits;
    NAME(Strip) strip;
    for (int64_t part = start; part < stop; part++) {
        const int64_t index = part / pass->strips, i = part % pass->strips, word = index % pass->words;
        const int64_t group = index / pass->words % pass->groups, image = index / pass->words / pass->groups;
        const int64_t first = pass->pixels * i / pass->strips, pixels = pass->pixels * (i + 1) / pass->strips - first;
        const int64_t left = pass->channels - word * share, count = left < share ? left : share;
        const int64_t channel = (image * pass->groups + group) * pass->channels + word * share;
        const int64_t in_row = (group * pass->words + word) * 8, bytes_left = pass->row_bytes - in_row;
        const size_t bytes = bytes_left < 8 ? (size_t)bytes_left : 8;
        int64_t place = (image * pass->pixels + first) * pass->row_bytes + in_row;
        for (int half = 0; half < 2; half++) {
            memset(strip.signs[half], 0, (size_t)pixels * 4);
            memset(strip.passes[half], 0, (size_t)pixels * 4);
        }
        if (operation == UNPACK_SIGNS || operation == UNPACK_CODES || operation == WHERE_PASSES) {
            const uint8_t *from = (operation == WHERE_PASSES ? pass->passes : pass->signs) + place;
            for (int64_t p = 0; p < pixels; p++, from += pass->row_bytes) {
                uint64_t all = 0;
                if (bytes == 8)
                    memcpy(&all, from, 8);
                else
                    memcpy(&all, from, bytes);
                for (int half = 0; half < 2; half++)
                    *(operation == WHERE_PASSES ? &strip.passes[half][p] : &strip.signs[half][p]) =
                        (int32_t)(all >> 32 * half);
            }
        }
        for (int64_t c = 0; c < count; c++) {
            const int64_t at = (channel + c) * pass->pixels + first;
            const int half = (int)c * bits / 32, bit = (int)c * bits % 32;
            int64_t p = 0;
            for (; p + LANES <= pixels; p += LANES)
                NAME(visit)(pass, at + p, LANES, bit, strip.signs[half] + p, strip.passes[half] + p, operation, type);
            if (p < pixels)
                NAME(visit)(pass, at + p, (int)(pixels - p), bit, strip.signs[half] + p, strip.passes[half] + p,
                            operation, type);
        }
        if (operation == UNPACK_SIGNS || operation == UNPACK_CODES || operation == WHERE_PASSES) continue;
        const uint64_t full = ~(uint64_t)0 >> (WORD - count);
        uint64_t all = full;
        for (int64_t p = 0; p < pixels; p++, place += pass->row_bytes) {
            if (operation == PACK_CODES || operation == PACK_SIGNS || operation == PACK_BOTH) {
                const uint64_t found = NAME(gather)(strip.signs, p);
                if (bytes == 8)
                    memcpy(pass->signs + place, &found, 8);
                else
                    memcpy(pass->signs + place, &found, bytes);
            }
            if (operation == PACK_PASSES || operation == PACK_BOTH || operation == CLAMP) {
                const uint64_t found = NAME(gather)(strip.passes, p);
                memcpy(pass->passes + place, &found, 8);
                all &= found;
            }
        }
        if (all != full) __atomic_store_n(pass->stops, 1, __ATOMIC_RELAXED);
    }
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
