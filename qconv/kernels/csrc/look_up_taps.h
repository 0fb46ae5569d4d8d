/* The gradient of the weight: for each of its taps a sum over all positions. Part of look_up_rows.h. */

/* The codes of the input: (groups, blocks of WIDE channels, folds, grid_h, grid_w, WIDE). A fold is FOLD pictures. */
static TARGET void NAME(input_codes)(LookUp *g, int64_t start, int64_t stop) { /* over folds and rows of the grid */
    const int64_t wides = CEIL(g->in_channels, WIDE), folds = CEIL(g->batch, FOLD), pixel = g->groups * g->words;
    const uint64_t outside = g->padding_value < 0 ? ~UINT64_C(0) : 0;
    for (int64_t at = start; at < stop; at++) {
        const int64_t fold = at / g->grid_h, row = at % g->grid_h, y = row - g->grid_top;
        for (int64_t column = 0; column < g->grid_w; column++) {
            const int64_t x = column - g->grid_left, place = y * g->width + x;
            const int inside = y >= 0 && y < g->height && x >= 0 && x < g->width;
            for (int64_t index = 0; index < pixel; index++) {
                uint64_t words[FOLD];
                uint8_t bytes[64];
                for (int64_t j = 0; j < FOLD; j++) {
                    const int64_t n = fold * FOLD + j;
                    words[j] = !inside ? outside
                               : n < g->batch ? g->signs[(n * g->height * g->width + place) * pixel + index] : 0;
                }
                NAME(encode)(words, bytes);
                const int64_t group = index / g->words, first = index % g->words * 64 / WIDE;
                for (int64_t c = 0, wide = first; c < 64 && wide < wides; c += WIDE, wide++) {
                    const int64_t block = ((group * wides + wide) * folds + fold) * g->grid_h + row;
                    memcpy(g->codes + (block * g->grid_w + column) * WIDE, bytes + c, WIDE);
                }
            }
        }
    }
}

/* Blocks of up to ROWS output channels of a group, and parts of its input channels. Chunks of positions whose tables stay
 * in the first cache are added up one after another, so that no sum depends on how blocks are shared out. */
static TARGET void NAME(weight_blocks)(LookUp *g, int64_t start, int64_t stop) {
    const int64_t taps = g->kernel_h * g->kernel_w, lines = CEIL(g->batch, FOLD) * g->out_h;
    const int64_t channels = g->groups * g->out_channels, picture = g->out_h * g->out_w * channels;
    const int64_t wides = CEIL(g->in_channels, WIDE), blocks = CEIL(g->out_channels, ROWS);
    const int64_t most = FIRST_CACHE / (int64_t)sizeof(float) / ENTRIES / ROWS; /* positions of a chunk */
    const int64_t width = g->out_w < most ? g->out_w : CEIL(g->out_w, CEIL(g->out_w, most)), height = most / width;
    const int64_t scratch = CEIL(wides, g->parts) * taps * ROWS * WIDE;
    static const float none[ROWS];
    if (start >= stop) return;
    float *tables = allocate((height * width * ROWS * ENTRIES + scratch) * (int64_t)sizeof(float));
    Run *runs = malloc((size_t)height * sizeof *runs);
    int64_t *tops = malloc((size_t)(2 * height) * sizeof *tops);
    if (tables == NULL || runs == NULL || tops == NULL) {
        g->failed = 1;
        goto done;
    }
    int64_t *grids = tops + height;
    float *sums = tables + height * width * ROWS * ENTRIES;
    for (int64_t at = start; at < stop; at++) {
        const int64_t group = at / g->parts / blocks, block = at / g->parts % blocks, part = at % g->parts;
        const int64_t o = g->out_channels * block / blocks, begin = wides * part / g->parts;
        const int64_t end = wides * (part + 1) / g->parts;
        const int rows = (int)(g->out_channels * (block + 1) / blocks - o);
        for (int64_t line = 0; line < lines; line += height)
            for (int64_t left = 0; left < g->out_w; left += width) {
                const int64_t high = line + height < lines ? height : lines - line;
                const int64_t right = left + width < g->out_w ? left + width : g->out_w;
                for (int64_t l = 0; l < high; l++) {
                    const int64_t fold = (line + l) / g->out_h, y = (line + l) % g->out_h;
                    tops[l] = y * g->stride_h;
                    grids[l] = (group * wides * CEIL(g->batch, FOLD) + fold) * g->grid_h;
                    const float *from = g->numbers + group * g->out_channels + o +
                                        (fold * FOLD * g->out_h + y) * g->out_w * channels;
                    for (int64_t c = left; c < right; c++) {
                        const float *stream[FOLD];
                        for (int j = 0; j < FOLD; j++) {
                            stream[j] = fold * FOLD + j < g->batch ? from + j * picture + c * channels : none;
                            __builtin_prefetch(stream[j]); /* all at once, for each is in another picture */
                            __builtin_prefetch(stream[j] + rows - 1);
                        }
                        NAME(tables)(stream, rows, (Places){tables + (l * width + c - left) * rows * ENTRIES, ENTRIES, 0, 0, 0});
                    }
                }
                for (int64_t wide = begin; wide < end; wide++)
                    for (int64_t tap = 0; tap < taps; tap++) {
                        const int64_t down = tap / g->kernel_w * g->dilation_h - g->top + g->grid_top;
                        const int64_t over = tap % g->kernel_w * g->dilation_w - g->left + g->grid_left;
                        int64_t from = over < 0 ? CEIL(-over, g->stride_w) : 0, to = CEIL(g->grid_w - over, g->stride_w);
                        int64_t found = 0;
                        if (from < left) from = left;
                        if (to > right) to = right;
                        const uint8_t *codes = g->codes + (from * g->stride_w + over) * WIDE;
                        for (int64_t l = 0; l < high && from < to; l++) {
                            const int64_t y = tops[l] + down;
                            if (y < 0 || y >= g->grid_h) continue;
                            const int64_t row = grids[l] + wide * CEIL(g->batch, FOLD) * g->grid_h + y;
                            runs[found++] = (Run){codes + row * g->grid_w * WIDE,
                                                  tables + (l * width + from - left) * rows * ENTRIES, to - from};
                        }
                        NAME(sums)(runs, found, g->stride_w * WIDE, rows * ENTRIES,
                                   sums + ((wide - begin) * taps + tap) * rows * WIDE, line > 0 || left > 0, rows,
                                   g->in_channels - wide * WIDE > LANES ? VECTORS : 1);
                    }
            }
        for (int r = 0; r < rows; r++) {
            float *out = g->out + (group * g->out_channels + o + r) * g->in_channels * taps;
            for (int64_t c = begin * WIDE; c < g->in_channels && c < end * WIDE; c++)
                for (int64_t tap = 0; tap < taps; tap++)
                    out[c * taps + tap] = sums[(((c / WIDE - begin) * taps + tap) * rows + r) * WIDE + c % WIDE];
        }
    }
done:
    free(tables);
    free(runs);
    free(tops);
}
