/* The packing over one instruction set: included once for each, with NAME, TARGET and sixteen. */

/* The signs of `count` floats in a row; the bits beyond them are 0. */
INLINE TARGET void NAME(row)(const float *x, int64_t count, uint64_t *bits) {
    for (int64_t first = 0; first < count; first += 64) {
        const int64_t here = count - first < 64 ? count - first : 64;
        uint64_t word = 0;
        int64_t i = 0;
        for (; i + 16 <= here; i += 16) word |= NAME(sixteen)(x + first + i) << i;
        for (; i < here; i++) word |= (uint64_t)(x[first + i] < 0) << i;
        bits[first / 64] = word;
    }
}

static TARGET void NAME(blocks)(const Packing *p, int64_t start, int64_t stop) {
    const int64_t words = (p->in_channels + 63) / 64, taps = p->taps, filter = p->in_channels * taps;
    for (int64_t block = start; block < stop; block++) {
        const int64_t group = block / p->blocks, first = block % p->blocks * BLOCK;
        uint64_t *out = p->words + block * taps * words * BLOCK;
        int32_t *sums = p->sums + group * taps * p->blocks * BLOCK + first;
        for (int64_t lane = 0; lane < BLOCK; lane++) {
            const int64_t o = first + lane;
            if (o >= p->out_channels) {
                for (int64_t i = 0; i < taps * words; i++) out[i * BLOCK + lane] = 0;
                for (int64_t tap = 0; tap < taps; tap++) sums[tap * p->blocks * BLOCK + lane] = 0;
                continue;
            }
            const float *weight = p->weight + (group * p->out_channels + o) * filter;
            for (int64_t word = 0; word < words; word++) {
                const int64_t left = p->in_channels - word * 64, channels = left < 64 ? left : 64;
                uint64_t bits[MOST_TAPS + 1], found[MOST_TAPS];
                if (!p->channels_last) {
                    bits[(channels * taps + 63) / 64] = 0; /* is read with the last bits */
                    NAME(row)(weight + word * 64 * taps, channels * taps, bits);
                    columns(bits, channels, taps, found);
                }
                for (int64_t tap = 0; tap < taps; tap++) {
                    uint64_t one = 0;
                    if (p->channels_last)
                        NAME(row)(weight + tap * p->in_channels + word * 64, channels, &one);
                    else
                        one = found[tap];
                    out[(tap * words + word) * BLOCK + lane] = one;
                    int32_t *sum = sums + tap * p->blocks * BLOCK + lane;
                    *sum = (word ? *sum : 0) + (int32_t)(channels - 2 * __builtin_popcountll(one));
                }
            }
        }
    }
}
