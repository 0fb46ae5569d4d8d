/* Sums of bits on AVX2. A byte of a pixel chooses two tables, see `Differing`, that say for each 4 bits of weights how
 * many differ. One shuffle looks up 32 channels in one table, or 16 channels in both, a byte for each. Bytes are added
 * up to 16 bits before they overflow. */

enum { FLUSH_AFTER = 31 }; /* bytes of a pixel, each of which adds up to 8 to a byte of sums */

/* Bytes to the sums of 16 bits; those of 16 channels lie in both halves. */
LANE void flush(const int NV, __m256i *bytes, __m256i *sums) {
    __m256i *second = sums + (NV > 1);
    sums[0] = _mm256_add_epi16(sums[0], _mm256_cvtepu8_epi16(_mm256_castsi256_si128(*bytes)));
    *second = _mm256_add_epi16(*second, _mm256_cvtepu8_epi16(_mm256_extracti128_si256(*bytes, 1)));
    *bytes = _mm256_setzero_si256();
}

/* As a whole where there are many: so gcc has them in registers, without further copies. */
LANE void copy_sums(const int P, const int M, __m256i (*to)[2], __m256i (*from)[2]) {
    if (M == 2) memcpy(to, from, 4 * sizeof *to);
    for (int p = 0; p < P && M == 1; p++) to[p][0] = from[p][0];
}

/* Adds bytes u to stop - 1 of the pixels. */
LANE void add_bytes(const int P, const int NV, __m256i (*bytes)[2], const uint8_t *const *at, const char *w, int64_t u,
                    int64_t stop, Differing *differing) {
    const int M = (NV + 1) / 2;
    __m256i sums[4][2];
    copy_sums(P, M, sums, bytes);
#pragma GCC unroll 1
    for (; u < stop; u++, w += 32 * NV) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const __m128i *of = (const __m128i *)differing[at[p][u]];
            const __m256i first = NV == 1 ? _mm256_load_si256((const __m256i *)of) : _mm256_broadcastsi128_si256(of[0]);
            const __m256i second = _mm256_broadcastsi128_si256(of[1]);
            for (int m = 0; m < M; m++) {
                __m256i count = _mm256_shuffle_epi8(first, _mm256_loadu_si256((const __m256i *)w + m));
                if (NV > 1)
                    count = _mm256_add_epi8(
                        count, _mm256_shuffle_epi8(second, _mm256_loadu_si256((const __m256i *)w + M + m)));
                sums[p][m] = _mm256_add_epi8(sums[p][m], count);
            }
        }
    }
    copy_sums(P, M, bytes, sums);
}

typedef void (*AddBytes)(__m256i (*bytes)[2], const uint8_t *const *at, const char *w, int64_t u, int64_t stop,
                         Differing *differing);

LANE void nibble_tile(const int P, const int NV, AddBytes add, const Step *s, const char *const *px, const char *w,
                      const int32_t *const *base, float *out) {
    const int M = (NV + 1) / 2;
    __m256i bytes[4][2], sums[4][2][2];
    for (int p = 0; p < 4; p++)
        for (int m = 0; m < 2; m++) bytes[p][m] = sums[p][m][0] = sums[p][m][1] = _mm256_setzero_si256();
    int64_t left = FLUSH_AFTER; /* bytes that may still be added */
    for (int64_t r = 0; r < s->rows; r++) {
        const uint8_t *at[4];
        for (int p = 0; p < P; p++) at[p] = (const uint8_t *)px[p] + s->row_at[r];
        for (int64_t u = 0; u < s->run;) {
            const int64_t wanted = s->run - u < FLUSH_AFTER ? s->run - u : FLUSH_AFTER;
            if (wanted > left) {
                left = FLUSH_AFTER;
                for (int p = 0; p < P; p++)
                    for (int m = 0; m < M; m++) flush(NV, &bytes[p][m], sums[p][m]);
            }
            if (M == 1)
                add_bytes(P, NV, bytes, at, w, u, u + wanted, s->differing);
            else
                add(bytes, at, w, u, u + wanted, s->differing);
            u += wanted, left -= wanted, w += 32 * NV * wanted;
        }
    }
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++) {
            flush(NV, &bytes[p][m], sums[p][m]);
            for (int k = 0; k < 2 && k < NV; k++) {
                const __m256i sum = sums[p][m][k];
                const I counts = {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(sum)),
                                  _mm256_cvtepu16_epi32(_mm256_extracti128_si256(sum, 1))};
                const int v = 2 * m + k;
                f_store(out + (p * NV + v) * LANES, i_float(i_less_twice(i_load(base[p] + LANES * v), counts)));
            }
        }
}

/* With many sums the loop over bytes is a function of its own: inlined, gcc keeps some of them in memory. */
#define NIBBLES(P, NV)                                                                                                 \
    static __attribute__((noinline)) TARGET void add_bytes_##P##_##NV(__m256i (*bytes)[2], const uint8_t *const *at,   \
                                                                      const char *w, int64_t u, int64_t stop,          \
                                                                      Differing *differing) {                          \
        add_bytes(P, NV, bytes, at, w, u, stop, differing);                                                            \
    }                                                                                                                  \
    static TARGET void NIBBLES_##P##_##NV(const Step *s, const char *const *px, const char *w,                         \
                                          const int32_t *const *base, const int32_t *spread, float *out) {             \
        (void)spread;                                                                                                  \
        nibble_tile(P, NV, add_bytes_##P##_##NV, s, px, w, base, out);                                                 \
    }
NIBBLES(4, 1) NIBBLES(4, 2) NIBBLES(4, 4) NIBBLES(2, 1) NIBBLES(2, 2) NIBBLES(2, 4)
NIBBLES(1, 1) NIBBLES(1, 2) NIBBLES(1, 4)
