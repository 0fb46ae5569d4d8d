/* Sums of bits on AVX2. A byte lane is an output channel: 4 bits of a pixel choose a table that says for each 4 bits of
 * weights how many differ, and one shuffle looks up 32 channels. Bytes are added up to 16 bits before they overflow. */

#define ROW(x) {                                                                                                       \
    __builtin_popcount(x), __builtin_popcount(x ^ 1), __builtin_popcount(x ^ 2), __builtin_popcount(x ^ 3),            \
    __builtin_popcount(x ^ 4), __builtin_popcount(x ^ 5), __builtin_popcount(x ^ 6), __builtin_popcount(x ^ 7),        \
    __builtin_popcount(x ^ 8), __builtin_popcount(x ^ 9), __builtin_popcount(x ^ 10), __builtin_popcount(x ^ 11),      \
    __builtin_popcount(x ^ 12), __builtin_popcount(x ^ 13), __builtin_popcount(x ^ 14), __builtin_popcount(x ^ 15)}
static const uint8_t differing[16][16] __attribute__((aligned(64))) = {
    ROW(0), ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6), ROW(7), ROW(8), ROW(9), ROW(10), ROW(11), ROW(12), ROW(13),
    ROW(14), ROW(15)};
#undef ROW
LANE __m256i table_of(unsigned bits) {
    return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)differing[bits]));
}
enum { FLUSH_AFTER = 31 }; /* bytes of a pixel, each of which adds up to 8 */

/* Bytes to the sums of 16 bits. */
LANE void flush(__m256i *bytes, __m256i *sums) {
    sums[0] = _mm256_add_epi16(sums[0], _mm256_cvtepu8_epi16(_mm256_castsi256_si128(*bytes)));
    sums[1] = _mm256_add_epi16(sums[1], _mm256_cvtepu8_epi16(_mm256_extracti128_si256(*bytes, 1)));
    *bytes = _mm256_setzero_si256();
}

/* As a whole where there are many: so gcc has them in registers, without further copies. */
LANE void copy_sums(const int P, const int M, __m256i (*to)[2], __m256i (*from)[2]) {
    if (M == 2) memcpy(to, from, 4 * sizeof *to);
    for (int p = 0; p < P && M == 1; p++) to[p][0] = from[p][0];
}

/* Adds bytes u to stop - 1 of the pixels. */
LANE void add_bytes(const int P, const int M, __m256i (*bytes)[2], const uint8_t *const *at, const char *w, int64_t u,
                    int64_t stop) {
    __m256i sums[4][2];
    copy_sums(P, M, sums, bytes);
#pragma GCC unroll 1
    for (; u < stop; u++, w += 64 * M) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const unsigned x = at[p][u];
            const __m256i first = table_of(x & 15), second = table_of(x >> 4);
            for (int m = 0; m < M; m++) {
                const __m256i low = _mm256_shuffle_epi8(first, _mm256_loadu_si256((const __m256i *)w + m));
                const __m256i high = _mm256_shuffle_epi8(second, _mm256_loadu_si256((const __m256i *)w + M + m));
                sums[p][m] = _mm256_add_epi8(sums[p][m], _mm256_add_epi8(low, high));
            }
        }
    }
    copy_sums(P, M, bytes, sums);
}

typedef void (*AddBytes)(__m256i (*bytes)[2], const uint8_t *const *at, const char *w, int64_t u, int64_t stop);

LANE void nibble_tile(const int P, const int NV, AddBytes add, const Step *s, const char *const *px, const char *w,
                      const int32_t *const *base, float *out) {
    const int M = NV / 2;
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
                    for (int m = 0; m < M; m++) flush(&bytes[p][m], sums[p][m]);
            }
            if (M == 1)
                add_bytes(P, M, bytes, at, w, u, u + wanted);
            else
                add(bytes, at, w, u, u + wanted);
            u += wanted, left -= wanted, w += 32 * NV * wanted;
        }
    }
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++) {
            flush(&bytes[p][m], sums[p][m]);
            for (int k = 0; k < 2; k++) {
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
                                                                      const char *w, int64_t u, int64_t stop) {        \
        add_bytes(P, NV / 2, bytes, at, w, u, stop);                                                                   \
    }                                                                                                                  \
    static TARGET void NIBBLES_##P##_##NV(const Step *s, const char *const *px, const char *w,                         \
                                          const int32_t *const *base, const int32_t *spread, float *out) {             \
        (void)spread;                                                                                                  \
        nibble_tile(P, NV, add_bytes_##P##_##NV, s, px, w, base, out);                                                 \
    }
NIBBLES(4, 2) NIBBLES(4, 4) NIBBLES(2, 2) NIBBLES(2, 4) NIBBLES(1, 2) NIBBLES(1, 4)
