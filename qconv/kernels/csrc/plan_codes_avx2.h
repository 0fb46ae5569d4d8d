/* Sums of codes on AVX2. Of small ones with small weights, `narrow` units are added in 16 bits before they are widened;
 * others are products of 16 bits, which do not saturate, with weights that have 16 bits in memory. */
LANE __m256i plus_16(__m256i sum, __m256i x) { /* see `plus` */
    __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(x));
    return sum;
}

LANE void narrow_tile(const int P, const Step *s, const char *const *px, const char *w, const int32_t *const *base,
                      float *out) {
    const int64_t rows_at_once = s->narrow < s->run ? 1 : s->narrow / s->run;
    const int64_t at_once = s->narrow < s->run ? s->narrow : s->run;
    I wide[PIXELS];
    for (int p = 0; p < P; p++) wide[p] = i_zero();
    for (int64_t first = 0; first < s->rows; first += rows_at_once)
        for (int64_t start = 0; start < s->run; start += at_once) {
            const int64_t stop = start + at_once < s->run ? start + at_once : s->run;
            I sums[PIXELS];
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) sums[p] = i_zero();
            for (int64_t row = first; row < first + rows_at_once && row < s->rows; row++) {
                const char *at[PIXELS];
                for (int p = 0; p < P; p++) at[p] = px[p] + s->row_at[row];
                int64_t u = start;
                do {
                    const I weights = i_load(w);
#pragma GCC unroll 4
                    for (int p = 0; p < P; p++) {
                        const __m256i x = _mm256_set1_epi32(*(const Unit *)(at[p] + 4 * u));
                        sums[p].a = plus_16(sums[p].a, _mm256_maddubs_epi16(x, weights.a));
                        sums[p].b = plus_16(sums[p].b, _mm256_maddubs_epi16(x, weights.b));
                    }
                    w += 64;
                } while (++u < stop);
            }
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                wide[p].a = _mm256_add_epi32(wide[p].a, _mm256_madd_epi16(sums[p].a, _mm256_set1_epi16(1)));
                wide[p].b = _mm256_add_epi32(wide[p].b, _mm256_madd_epi16(sums[p].b, _mm256_set1_epi16(1)));
            }
        }
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) f_store(out + p * LANES, finish_whole(SUM_CODES_SMALL, wide[p], base[p]));
}

#define NARROW_TILE(P)                                                                                                 \
    static TARGET void CODES_SMALL_##P##_1(const Step *s, const char *const *px, const char *w,                        \
                                           const int32_t *const *base, const int32_t *spread, float *out) {            \
        (void)spread;                                                                                                  \
        narrow_tile(P, s, px, w, base, out);                                                                           \
    }
NARROW_TILE(4) NARROW_TILE(2) NARROW_TILE(1)

/* Codes of even places, then those of odd ones. */
LANE void wide_tile(const int P, const int NV, const Step *s, const char *const *px, const char *w,
                    const int32_t *const *base, float *out) {
    I sums[PIXELS][2];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
        for (int v = 0; v < NV; v++) sums[p][v] = i_zero();
    for (int64_t row = 0; row < s->rows; row++) {
        const char *at[PIXELS];
        for (int p = 0; p < P; p++) at[p] = px[p] + s->row_at[row];
        int64_t u = 0;
        do {
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
                __m256i x[PIXELS];
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) {
                    const __m256i unit = _mm256_set1_epi32(*(const Unit *)(at[p] + 4 * u));
                    x[p] = k ? _mm256_srli_epi16(unit, 8) : _mm256_and_si256(unit, _mm256_set1_epi16(255));
                }
#pragma GCC unroll 2
                for (int v = 0; v < NV; v++, w += 64) {
                    const I weights = i_load(w);
#pragma GCC unroll 4
                    for (int p = 0; p < P; p++) {
                        sums[p][v].a = plus(sums[p][v].a, _mm256_madd_epi16(x[p], weights.a));
                        sums[p][v].b = plus(sums[p][v].b, _mm256_madd_epi16(x[p], weights.b));
                    }
                }
            }
        } while (++u < s->run);
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
        for (int v = 0; v < NV; v++) {
            const int32_t *from = base[p] == NULL ? NULL : base[p] + LANES * v;
            f_store(out + (p * NV + v) * LANES, finish_whole(SUM_CODES, sums[p][v], from));
        }
}

#define WIDE_TILE(P, NV)                                                                                               \
    static TARGET void CODES_WIDE_##P##_##NV(const Step *s, const char *const *px, const char *w,                      \
                                             const int32_t *const *base, const int32_t *spread, float *out) {          \
        (void)spread;                                                                                                  \
        wide_tile(P, NV, s, px, w, base, out);                                                                         \
    }
WIDE_TILE(4, 1) WIDE_TILE(2, 1) WIDE_TILE(1, 1) WIDE_TILE(2, 2) WIDE_TILE(1, 2)
/* Registers have room for 4 sums. */
static TARGET void CODES_WIDE_4_2(const Step *s, const char *const *px, const char *w, const int32_t *const *base,
                                  const int32_t *spread, float *out) {
    CODES_WIDE_2_2(s, px, w, base, spread, out);
    CODES_WIDE_2_2(s, px + 2, w, base + 2, spread, out + 4 * LANES);
}
