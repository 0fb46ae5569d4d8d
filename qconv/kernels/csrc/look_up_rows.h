/* The gradients over one instruction set: included once for each, with NAME, TARGET, LANES, ENTRIES, FOLD, ROWS, VECTORS,
 * Floats, Table, Choice and zero, load, store, choose, table, add, keep, some, tables and encode. */

#define WIDE (LANES * VECTORS) /* channels of a block of codes */

/* out[r] = the sums over all runs of table r of each step, looked up by the step's codes: rows × vectors of channels. Both
 * are known when it is inlined. With `more` they are added to `out`, which rounds less than going on from it. */
INLINE TARGET void NAME(tile)(const Run *run, int64_t runs, int64_t code_step, int64_t table_step, float *out, int more,
                              int rows, int vectors) {
    Floats sums[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = NAME(zero)();
    for (const Run *end = run + runs; run < end; run++) {
        const uint8_t *code = run->codes;
        const float *at = run->tables;
#pragma GCC unroll 1
        for (int64_t left = run->count; left > 0; left--, code += code_step, at += table_step) {
            Choice choice[VECTORS];
            for (int v = 0; v < vectors; v++) choice[v] = NAME(choose)(code + v * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const Table table = NAME(table)(at + r * ENTRIES);
                for (int v = 0; v < vectors; v++) sums[r][v] = NAME(add)(sums[r][v], table, choice[v]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            float *to = out + r * WIDE + v * LANES;
            if (more) sums[r][v] += NAME(load)(to);
            NAME(store)(to, sums[r][v]);
        }
}

static TARGET void NAME(sums)(const Run *run, int64_t runs, int64_t code_step, int64_t table_step, float *out, int more,
                              int rows, int vectors) {
#define CASE(rows)                                                                                                    \
    case rows:                                                                                                        \
        if (vectors == VECTORS)                                                                                       \
            NAME(tile)(run, runs, code_step, table_step, out, more, rows, VECTORS);                                   \
        else                                                                                                          \
            NAME(tile)(run, runs, code_step, table_step, out, more, rows, 1);                                         \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
#undef CASE
}

/* The codes of the weight: (groups, blocks of WIDE input channels, kh, kw, tables, WIDE). Table t of a group is that of
 * its output channels t, t + tables, ... */
static TARGET void NAME(weight_codes)(Gradient *g, int64_t start, int64_t stop) { /* over groups and taps */
    const int64_t taps = g->kernel_h * g->kernel_w, tables = CEIL(g->out_channels, FOLD);
    const int64_t wides = CEIL(g->in_channels, WIDE);
    for (int64_t place = start; place < stop; place++) {
        const int64_t group = place / taps, tap = place % taps;
        const uint64_t *signs = g->signs + (group * g->blocks * taps + tap) * g->words * BLOCK;
        for (int64_t t = 0; t < tables; t++)
            for (int64_t word = 0; word < g->words; word++) {
                uint64_t words[FOLD];
                uint8_t bytes[64];
                for (int j = 0; j < FOLD; j++) {
                    const int64_t o = j * tables + t;
                    const uint64_t *from = signs + (o / BLOCK * taps * g->words + word) * BLOCK + o % BLOCK;
                    words[j] = o < g->out_channels ? *from : 0;
                }
                NAME(encode)(words, bytes);
                for (int64_t c = 0, wide = word * 64 / WIDE; c < 64 && wide < wides; c += WIDE, wide++)
                    memcpy(g->codes + (((group * wides + wide) * taps + tap) * tables + t) * WIDE, bytes + c, WIDE);
            }
    }
}

/* The tables of a row of grad_output: (groups, tables, columns, ENTRIES), columns those of `images` pictures in turn. The
 * factors are sorted first, (FOLD, out_w, tables), so that all lanes of a vector are used. */
static TARGET void NAME(table_row)(const Gradient *g, int64_t image, int64_t images, int64_t row, int64_t margin,
                                   int64_t columns, const float *scale, float *sorted, float *to) {
    const int64_t tables = CEIL(g->out_channels, FOLD), channels = g->groups * g->out_channels;
    const int64_t all = g->out_w * tables, stream_step = all + LANES;
    for (int64_t n = 0; n < images; n++)
        for (int64_t group = 0; group < g->groups; group++) {
            const float *stream[FOLD], *times = scale + (g->scale == NULL ? 0 : group * g->out_channels);
            const float *from = g->grad_output + ((image + n) * g->out_h + row) * g->out_w * channels;
            from += group * g->out_channels;
            for (int64_t c = 0; c < g->out_w; c++, from += channels)
                for (int64_t j = 0, o = 0; j < FOLD; j++, o += tables) {
                    const int64_t rest = g->out_channels - o; /* what is missing is 0 */
                    for (int64_t t = 0; t < tables; t += LANES) {
                        const int64_t count = rest - t < tables - t ? rest - t : tables - t;
                        const Floats values = NAME(some)(from + o + t, count) * NAME(some)(times + o + t, count);
                        NAME(store)(sorted + j * stream_step + c * tables + t, values); /* the next ones overwrite the rest */
                    }
                }
            for (int j = 0; j < FOLD; j++) stream[j] = sorted + j * stream_step;
            const Places places = {to + (group * tables * columns + margin * images + n) * ENTRIES, columns * ENTRIES, tables,
                                   images * ENTRIES, 0};
            NAME(tables)(stream, all, places);
        }
}

/* What becomes of the sums of some pixels, (blocks of channels, rows, WIDE). */
static TARGET void NAME(finish)(const Gradient *g, const float *sums, int rows, int64_t image, int64_t images, int64_t y,
                                int64_t phase, int64_t first, int64_t group) {
    int64_t n = first % images, x = phase + first / images * g->stride_w;
    for (int r = 0; r < rows; r++) {
        const int64_t place = (((image + n) * g->height + y) * g->width + x) * g->groups + group;
        float *out = g->out + place * g->in_channels;
        const uint64_t *passes = g->passes == NULL ? NULL : g->passes + place * g->words;
        for (int64_t c = 0; c < g->in_channels; c += LANES) {
            Floats value = NAME(load)(sums + (c / WIDE * rows + r) * WIDE + c % WIDE);
            if (passes != NULL) value = NAME(keep)(value, (unsigned)(passes[c / 64] >> c % 64));
            if (c + LANES <= g->in_channels) {
                NAME(store)(out + c, value);
            } else {
                float tail[LANES];
                NAME(store)(tail, value);
                memcpy(out + c, tail, (size_t)(g->in_channels - c) * sizeof(float));
            }
        }
        if (++n == images) {
            n = 0;
            x += g->stride_w;
        }
    }
}

/* Rows of grad_input, counted over all groups of `images` pictures, whose pixels take turns in a row: narrow pictures then
 * fill a tile as well. The tables of the rows of grad_output that a row needs stay in a ring. */
static TARGET void NAME(input_rows)(Gradient *g, int64_t start, int64_t stop) {
    const int64_t taps = g->kernel_h * g->kernel_w, tables = CEIL(g->out_channels, FOLD);
    const int64_t wides = CEIL(g->in_channels, WIDE), slots = (g->kernel_h - 1) * g->dilation_h / g->stride_h + 1;
    int64_t margin = 0, last = g->out_w;
    for (int64_t phase = 0; phase < g->stride_w && phase < g->width; phase++)
        for (int64_t kw = 0; kw < g->kernel_w; kw++) {
            const int64_t c = phase + g->left - kw * g->dilation_w;
            if (c % g->stride_w) continue;
            const int64_t end = c / g->stride_w + CEIL(g->width - phase, g->stride_w);
            if (-c / g->stride_w > margin) margin = -c / g->stride_w;
            if (end > last) last = end;
        }
    const int64_t slot = g->groups * tables * (margin + last) * g->images * ENTRIES;
    const int64_t scratch = wides * ROWS * WIDE, sorting = FOLD * (g->out_w * tables + LANES);
    if (start >= stop) return;
    float *ring = allocate((slots * slot + scratch + sorting + g->out_channels) * (int64_t)sizeof(float));
    Run *runs = malloc((size_t)taps * sizeof *runs);
    int64_t *held = malloc((size_t)(slots + 2 * (g->kernel_h + g->kernel_w)) * sizeof *held);
    if (ring == NULL || runs == NULL || held == NULL) {
        g->failed = 1;
        goto done;
    }
    int64_t *khs = held + slots, *rows = khs + g->kernel_h, *kws = rows + g->kernel_h, *columns = kws + g->kernel_w;
    float *sums = ring + slots * slot, *sorted = sums + scratch, *ones = sorted + sorting;
    for (int64_t o = 0; o < g->out_channels; o++) ones[o] = 1;
    int64_t images = 0;
    for (int64_t at = start; at < stop; at++) {
        const int64_t image = at / g->height * g->images, y = at % g->height;
        const int64_t together = image + g->images <= g->batch ? g->images : g->batch - image;
        const int64_t across = (margin + last) * together;
        if (together != images) { /* the margins lie elsewhere */
            memset(ring, 0, (size_t)(slots * slot) * sizeof(float));
            for (int64_t s = 0; s < slots; s++) held[s] = -1;
            images = together;
        }
        int64_t down = 0; /* the rows of the kernel that reach grad_output, and where their tables are */
        for (int64_t kh = 0; kh < g->kernel_h; kh++) {
            const int64_t r = y + g->top - kh * g->dilation_h, row = r / g->stride_h;
            if (r < 0 || r % g->stride_h || row >= g->out_h) continue;
            khs[down] = kh * g->kernel_w;
            rows[down++] = row % slots * slot;
            if (held[row % slots] == image * g->out_h + row) continue;
            held[row % slots] = image * g->out_h + row;
            NAME(table_row)(g, image, images, row, margin, across, g->scale == NULL ? ones : g->scale, sorted,
                            ring + row % slots * slot);
        }
        for (int64_t phase = 0; phase < g->stride_w && phase < g->width; phase++) {
            int64_t over = 0;
            for (int64_t kw = 0; kw < g->kernel_w; kw++) {
                const int64_t c = phase + g->left - kw * g->dilation_w;
                if (c % g->stride_w) continue;
                kws[over] = kw;
                columns[over++] = (margin + c / g->stride_w) * images * ENTRIES;
            }
            const int64_t pixels = CEIL(g->width - phase, g->stride_w) * images, tiles = CEIL(pixels, ROWS);
            /* tables of all taps of a tile, so that they are in the first cache for all blocks of channels */
            const int64_t spread = g->kernel_w * images / g->stride_w + ROWS;
            const int64_t most = CEIL(FIRST_CACHE / (int64_t)sizeof(float) / ENTRIES, (down ? down : 1) * spread);
            const int64_t parts = CEIL(tables, most), part = CEIL(tables, parts);
            for (int64_t group = 0; group < g->groups; group++)
                for (int64_t tile = 0; tile < tiles; tile++) {
                    const int64_t first = pixels * tile / tiles;
                    const int count = (int)(pixels * (tile + 1) / tiles - first);
                    for (int64_t t = 0; t < tables; t += part) {
                        const float *from = ring + ((group * tables + t) * across + first) * ENTRIES;
                        const int64_t some = t + part < tables ? part : tables - t;
                        for (int64_t wide = 0; wide < wides; wide++) {
                            const uint8_t *codes = g->codes + ((group * wides + wide) * taps * tables + t) * WIDE;
                            Run *run = runs;
                            for (int64_t i = 0; i < down; i++)
                                for (int64_t j = 0; j < over; j++)
                                    *run++ = (Run){codes + (khs[i] + kws[j]) * tables * WIDE, from + rows[i] + columns[j], some};
                            NAME(sums)(runs, down * over, WIDE, across * ENTRIES, sums + wide * count * WIDE, t > 0, count,
                                       g->in_channels - wide * WIDE > LANES ? VECTORS : 1);
                        }
                    }
                    NAME(finish)(g, sums, count, image, images, y, phase, first, group);
                }
        }
    }
done:
    free(ring);
    free(runs);
    free(held);
}

/* The codes of the input: (groups, blocks of WIDE channels, folds, grid_h, grid_w, WIDE). A fold is FOLD pictures. */
static TARGET void NAME(input_codes)(Gradient *g, int64_t start, int64_t stop) { /* over folds and rows of the grid */
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
static TARGET void NAME(weight_blocks)(Gradient *g, int64_t start, int64_t stop) {
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
                    const float *from = g->grad_output + group * g->out_channels + o +
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

#undef WIDE
#undef NAME
#undef TARGET
#undef LANES
#undef ENTRIES
#undef FOLD
#undef ROWS
#undef VECTORS
#undef Floats
#undef Table
#undef Choice
