/* Sums of codes by AMX: 32 pixels and 32 channels at once, in 4 tiles of whole numbers; 64 codes of 16 pixels are a
 * tile, and their weights for 16 channels another one. */

#define AMX_TARGET __attribute__((target(SETS ",amx-tile,amx-int8")))
enum { ROWS = 16 }; /* of a tile */

/* `rows` of pixels in the first two and in the last two tiles of sums. */
static AMX_TARGET void set_rows(const uint8_t rows[2]) {
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) shape.bytes[tile] = 64, shape.rows[tile] = ROWS;
    for (int g = 0; g < 2; g++) shape.rows[2 * g] = shape.rows[2 * g + 1] = shape.rows[4 + g] = rows[g];
    __asm__ volatile("ldtilecfg %0" : : "m"(shape));
}

/* Two groups of pixels, which lie `step` bytes apart from each other, times 16 or 32 channels. */
INLINE AMX_TARGET void multiply(const Step *s, const char *const in[2], int64_t step, const char *w, const int is_wide,
                                int32_t sums[2][2][ROWS][LANES]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int64_t next = is_wide ? 128 : 64;
    for (int64_t r = 0; r < s->rows; r++)
        for (int64_t u = 0; u < s->run; u += ROWS, w += ROWS * next) {
            _tile_loadd(4, in[0] + s->row_at[r] + 4 * u, step);
            _tile_loadd(5, in[1] + s->row_at[r] + 4 * u, step);
            _tile_loadd(6, w, next);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(2, 5, 6);
            if (!is_wide) continue;
            _tile_loadd(7, w + 64, next);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(3, 5, 7);
        }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(2, sums[1][0], 64);
    if (!is_wide) return;
    _tile_stored(1, sums[0][1], 64);
    _tile_stored(3, sums[1][1], 64);
}

/* As `convolve_block`. Pixels that lie between others, as those of a border, are computed, too, and left out. */
static AMX_TARGET void convolve_block_amx(const Step *s, const char *in, const Outs *outs, int block, int start,
                                          int stop, Finish then) {
    const int channel = block * s->nv * LANES;
    const int64_t step = s->pixel_step;
    const char *w = s->weight + block * s->block_bytes;
    float acc[2 * ROWS * 2 * LANES] __attribute__((aligned(64)));
    int32_t sums[2][2][ROWS][LANES] __attribute__((aligned(64)));
    uint8_t set[2] = {0, 0};
    in += s->block_at[block];
    for (int q = start; q < stop;) {
        const char *first[2] = {in + s->in_at[q], in + s->in_at[q]};
        uint8_t rows[2] = {1, 1};
        int32_t *from[2 * ROWS];
        int count = 0;
        for (int g = 0; g < 2 && q + count < stop; g++) {
            int64_t at = s->in_at[q + count];
            first[g] = in + at;
            for (int row = 0; row < ROWS && q + count < stop; row++, at += step)
                if (s->in_at[q + count] == at) from[count++] = sums[g][0][row], rows[g] = (uint8_t)(row + 1);
        }
        if (rows[0] != set[0] || rows[1] != set[1]) set_rows(rows), set[0] = rows[0], set[1] = rows[1];
        if (s->nv == 2)
            multiply(s, first, step, w, 1, sums);
        else
            multiply(s, first, step, w, 0, sums);
        for (int p = 0; p < count; p++) {
            const int32_t *base = base_of(s, q + p, channel);
            for (int v = 0; v < s->nv; v++) {
                const I sum = i_load(from[p] + v * ROWS * LANES);
                f_store(acc + (p * s->nv + v) * LANES,
                        finish_whole(SUM_CODES, sum, base == NULL ? NULL : base + LANES * v));
            }
        }
        then(outs, acc, q, count, channel, s->nv);
        q += count;
    }
    _tile_release();
}
