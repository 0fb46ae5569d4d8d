/* Convolutions with a weight of signs: for each pixel of the output a sum over the taps. Part of look_up_rows.h.
 *
 * The forward and the gradient of the input are both. They differ in which channels are added up, and in the pixels
 * that a tap reads: a forward with a stride skips some of the numbers, its gradient some of the taps. */

/* The codes of the weight: (groups, blocks of WIDE channels of the output, kh, kw, tables, WIDE). Table t of a group is
 * that of the channels t, t + tables, ... of the numbers. */
static TARGET void NAME(weight_codes)(int64_t start, int64_t stop, void *call) { /* over groups and taps */
    LookUp *g = call;
    const int64_t taps = g->kernel_h * g->kernel_w, tables = CEIL(g->from_channels, FOLD);
    const int64_t wides = CEIL(g->to_channels, WIDE), to_words = CEIL(g->to_channels, 64);
    if (start >= stop) return;
    uint64_t *rows = malloc((size_t)(CEIL(g->from_channels, 64) * 64 * to_words) * sizeof *rows);
    if (rows == NULL) {
        g->failed = 1;
        return;
    }
    for (int64_t place = start; place < stop; place++) {
        const int64_t group = place / taps, tap = place % taps;
        rows_of_signs(g, group, tap, rows);
        for (int64_t t = 0; t < tables; t++)
            for (int64_t word = 0; word < to_words; word++) {
                uint64_t words[FOLD];
                uint8_t bytes[64];
                for (int j = 0; j < FOLD; j++) {
                    const int64_t c = j * tables + t;
                    words[j] = c < g->from_channels ? rows[c * to_words + word] : 0;
                }
                NAME(encode)(words, bytes);
                for (int64_t c = 0, wide = word * 64 / WIDE; c < 64 && wide < wides; c += WIDE, wide++)
                    memcpy(g->codes + (((group * wides + wide) * taps + tap) * tables + t) * WIDE, bytes + c, WIDE);
            }
    }
    free(rows);
}

/* The tables of a row of numbers of `images` pictures in turn. The factors are sorted first, (FOLD, from_w, tables),
 * strip after strip, so that all lanes of a vector are used. */
static TARGET void NAME(table_row)(const LookUp *g, int64_t image, int64_t images, int64_t row, Strips strips,
                                   const float *times, int64_t times_step, float *sorted, float *room,
                                   float *to) {
    const int64_t tables = CEIL(g->from_channels, FOLD), channels = g->groups * g->from_channels;
    const int64_t stream_step = g->from_w * tables + LANES, across = strips.strips * strips.columns * images;
    for (int64_t n = 0; n < images; n++) {
        const int64_t place = ((image + n) * g->from_h + row) * g->from_w * channels;
        if (g->is_bfloat16) NAME(widen)((const uint16_t *)g->numbers + place, g->from_w * channels, room);
        const float *numbers = g->is_bfloat16 ? room : (const float *)g->numbers + place;
        for (int64_t group = 0; group < g->groups; group++) {
            const float *scale = times + group * times_step;
            const float *from = numbers + group * g->from_channels;
            for (int64_t s = 0; s < strips.strips && s < g->from_w; s++) {
                if (strips.strips <= 62 && !(strips.used >> s & 1)) continue;
                const int64_t count = CEIL(g->from_w - s, strips.strips);
                for (int64_t i = 0; i < count; i++) {
                    const float *pixel = from + (s + i * strips.strips) * channels;
                    for (int64_t j = 0, c = 0; j < FOLD; j++, c += tables) {
                        const int64_t rest = g->from_channels - c; /* what is missing is 0 */
                        for (int64_t t = 0; t < tables; t += LANES) {
                            const int64_t some = rest - t < tables - t ? rest - t : tables - t;
                            const Floats values = NAME(some)(pixel + c + t, some) * NAME(some)(scale + c + t, some);
                            NAME(store)(sorted + j * stream_step + i * tables + t, values); /* the next go over it */
                        }
                    }
                }
                const float *stream[FOLD];
                for (int j = 0; j < FOLD; j++) stream[j] = sorted + j * stream_step;
                const int64_t place = group * tables * across + (s * strips.columns + strips.margin) * images + n;
                float *at = to + place * ENTRIES;
                NAME(tables)(stream, count * tables, (Places){at, across * ENTRIES, tables, images * ENTRIES, 0});
            }
        }
    }
}

/* What becomes of the sums of some pixels, (blocks of channels, rows, WIDE). */
static TARGET void NAME(finish)(const LookUp *g, const float *sums, int rows, int64_t image, int64_t images, int64_t y,
                                int64_t phase, int64_t first, int64_t group) {
    const float *scale = g->scale == NULL ? NULL : g->scale + group * g->to_channels;
    const float *bias = g->bias == NULL ? NULL : g->bias + group * g->to_channels;
    const int scales = g->forward && scale != NULL;
    int64_t n = first % images, x = phase + first / images * g->across.every;
    for (int r = 0; r < rows; r++) {
        const int64_t place = (((image + n) * g->to_h + y) * g->to_w + x) * g->groups + group;
        const uint64_t *passes = g->passes == NULL ? NULL : g->passes + place * g->words;
        for (int64_t c = 0; c < g->to_channels; c += LANES) {
            const int64_t rest = g->to_channels - c;
            Floats value = NAME(load)(sums + (c / WIDE * rows + r) * WIDE + c % WIDE);
            if (scales) value *= NAME(some)(scale + c, rest);
            if (bias != NULL) value += NAME(some)(bias + c, rest);
            if (passes != NULL) value = NAME(keep)(value, (unsigned)(passes[c / 64] >> c % 64));
            const int64_t at = place * g->to_channels + c, count = rest < LANES ? rest : LANES;
            if (!g->is_bfloat16 && rest >= LANES) {
                NAME(store)((float *)g->out + at, value);
                continue;
            }
            float lanes[LANES];
            NAME(store)(lanes, value);
            if (g->is_bfloat16)
                NAME(narrow)(lanes, count, (uint16_t *)g->out + at);
            else
                memcpy((float *)g->out + at, lanes, (size_t)count * sizeof(float));
        }
        if (++n == images) {
            n = 0;
            x += g->across.every;
        }
    }
}

/* Rows of the output, counted over all groups of `images` pictures, whose pixels take turns in a row: narrow pictures
 * then fill a tile as well. The tables of the rows of numbers that a row needs stay in a ring. */
static TARGET void NAME(pixel_rows)(int64_t start, int64_t stop, void *call) {
    LookUp *g = call;
    const Axis down = g->down, over = g->across;
    const int64_t taps = g->kernel_h * g->kernel_w, tables = CEIL(g->from_channels, FOLD);
    const int64_t wides = CEIL(g->to_channels, WIDE);
    const int64_t slots = (g->kernel_h - 1) * (down.tap < 0 ? -down.tap : down.tap) / down.every + 1;
    const Strips strips = strips_of(g);
    const int64_t slot = g->groups * tables * strips.strips * strips.columns * g->images * ENTRIES;
    const int64_t scratch = wides * ROWS * WIDE, sorting = FOLD * (g->from_w * tables + LANES);
    const int64_t room = g->is_bfloat16 ? g->from_w * g->groups * g->from_channels : 0;
    if (start >= stop) return;
    float *ring = allocate((slots * slot + scratch + sorting + room + g->from_channels) * (int64_t)sizeof(float));
    Run *runs = malloc((size_t)taps * sizeof *runs);
    int64_t *held = malloc((size_t)(slots + 2 * (g->kernel_h + g->kernel_w)) * sizeof *held);
    if (ring == NULL || runs == NULL || held == NULL) {
        g->failed = 1;
        goto done;
    }
    int64_t *khs = held + slots, *rows = khs + g->kernel_h, *kws = rows + g->kernel_h, *columns = kws + g->kernel_w;
    float *sums = ring + slots * slot, *sorted = sums + scratch, *wide_row = sorted + sorting, *ones = wide_row + room;
    for (int64_t c = 0; c < g->from_channels; c++) ones[c] = 1;
    const int scales = !g->forward && g->scale != NULL;
    int64_t images = 0;
    for (int64_t at = start; at < stop; at++) {
        const int64_t image = at / g->to_h * g->images, y = at % g->to_h;
        const int64_t together = image + g->images <= g->batch ? g->images : g->batch - image;
        const int64_t across = strips.strips * strips.columns * together;
        if (together != images) { /* the margins lie elsewhere */
            memset(ring, 0, (size_t)(slots * slot) * sizeof(float));
            for (int64_t s = 0; s < slots; s++) held[s] = -1;
            images = together;
        }
        int64_t count_h = 0; /* the rows of the kernel that reach numbers, and where their tables are */
        for (int64_t kh = 0; kh < g->kernel_h; kh++) {
            const int64_t r = down.first + y * down.step + kh * down.tap, row = r / down.every;
            if (r < 0 || r % down.every || row >= g->from_h) continue;
            khs[count_h] = kh * g->kernel_w;
            rows[count_h++] = row % slots * slot;
            if (held[row % slots] == image * g->from_h + row) continue;
            held[row % slots] = image * g->from_h + row;
            NAME(table_row)(g, image, images, row, strips, scales ? g->scale : ones, scales ? g->from_channels : 0,
                            sorted, wide_row, ring + row % slots * slot);
        }
        for (int64_t phase = 0; phase < over.every && phase < g->to_w; phase++) {
            int64_t count_w = 0;
            for (int64_t kw = 0; kw < g->kernel_w; kw++) {
                const int64_t c = over.first + phase * over.step + kw * over.tap;
                if (c % over.every) continue;
                const int64_t column = floor_of(c / over.every, over.step), strip = c / over.every - column * over.step;
                kws[count_w] = kw;
                columns[count_w++] = (strip * strips.columns + strips.margin + column) * images * ENTRIES;
            }
            const int64_t pixels = CEIL(g->to_w - phase, over.every) * images, tiles = CEIL(pixels, ROWS);
            /* tables of all taps of a tile, so that they are in the first cache for all blocks of channels */
            const int64_t read = over.step < g->kernel_w ? over.step : g->kernel_w; /* strips */
            const int64_t spread = g->kernel_w * images / over.every + read * ROWS;
            const int64_t most = CEIL(FIRST_CACHE / (int64_t)sizeof(float) / ENTRIES, (count_h ? count_h : 1) * spread);
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
                            for (int64_t i = 0; i < count_h; i++)
                                for (int64_t j = 0; j < count_w; j++)
                                    *run++ = (Run){codes + (khs[i] + kws[j]) * tables * WIDE,
                                                   from + rows[i] + columns[j], some};
                            NAME(sums)(runs, count_h * count_w, WIDE, across * ENTRIES, sums + wide * count * WIDE,
                                       t > 0, count, g->to_channels - wide * WIDE > LANES ? VECTORS : 1);
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
