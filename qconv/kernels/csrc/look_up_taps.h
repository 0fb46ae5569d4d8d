/* The gradient of the weight: for each of its taps a sum over all positions. Part of look_up_rows.h. */

/* The codes of the input: (groups, blocks of WIDE channels, folds, grid_h, grid_w, WIDE). A fold is FOLD pictures. */
static TARGET void NAME(input_codes)(int64_t start, int64_t stop, void *call) { /* over folds and rows of the grid */
    LookUp *g = call;
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

/* Some positions: of `high` lines, rows of the output of FOLD pictures, the columns from `left` to `right`. */
typedef struct {
    int64_t line, high, left, right;
    int64_t *tops, *grids; /* of each line: its first row of the input, and where its fold's codes begin */
} NAME(Chunk);

/* The tables of the output channels from `o` on, (lines, columns, rows, ENTRIES). */
static TARGET void NAME(position_tables)(const LookUp *g, const NAME(Chunk) *chunk, int64_t o, int rows, float *to) {
    const int64_t channels = g->groups * g->out_channels, picture = g->out_h * g->out_w * channels;
    const int64_t size = g->is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
    static const float none[ROWS];
    for (int64_t l = 0; l < chunk->high; l++) {
        const int64_t fold = (chunk->line + l) / g->out_h, y = (chunk->line + l) % g->out_h;
        const int64_t first = (fold * FOLD * g->out_h + y) * g->out_w * channels + o;
        const int64_t there = g->batch - fold * FOLD < FOLD ? g->batch - fold * FOLD : FOLD;
        const char *from = (const char *)g->numbers + (first + chunk->left * channels) * size;
        for (int64_t c = chunk->left; c < chunk->right; c++, from += channels * size, to += rows * ENTRIES) {
            const char *at[FOLD];
            const float *stream[FOLD];
            float room[FOLD][ROWS];
            for (int64_t j = 0; j < FOLD; j++) {
                at[j] = j < there ? from + j * picture * size : (const char *)none;
                __builtin_prefetch(at[j]); /* all at once, for each is in another picture */
                __builtin_prefetch(at[j] + (rows - 1) * size);
            }
            for (int64_t j = 0; j < FOLD; j++) {
                const int is_narrow = g->is_bfloat16 && j < there;
                if (is_narrow) NAME(widen)((const uint16_t *)at[j], rows, room[j]);
                stream[j] = is_narrow ? room[j] : (const float *)at[j];
            }
            NAME(tables)(stream, rows, (Places){to, ENTRIES, 0, 0, 0});
        }
    }
}

/* Adds the sums over some positions, (blocks of input channels from `begin` to `end`, taps, rows, WIDE). */
static TARGET void NAME(position_sums)(const LookUp *g, const NAME(Chunk) *chunk, int64_t begin, int64_t end, int rows,
                                       const float *tables, Run *runs, float *sums, int more) {
    const int64_t taps = g->kernel_h * g->kernel_w, width = chunk->right - chunk->left, folds = CEIL(g->batch, FOLD);
    for (int64_t wide = begin; wide < end; wide++)
        for (int64_t tap = 0; tap < taps; tap++, sums += rows * WIDE) {
            const int64_t down = tap / g->kernel_w * g->dilation_h - g->top + g->grid_top;
            const int64_t over = tap % g->kernel_w * g->dilation_w - g->left + g->grid_left;
            int64_t from = over < 0 ? CEIL(-over, g->stride_w) : 0, to = CEIL(g->grid_w - over, g->stride_w);
            int64_t found = 0;
            if (from < chunk->left) from = chunk->left;
            if (to > chunk->right) to = chunk->right;
            const uint8_t *codes = g->codes + (from * g->stride_w + over) * WIDE;
            for (int64_t l = 0; l < chunk->high && from < to; l++) {
                const int64_t y = chunk->tops[l] + down, row = chunk->grids[l] + wide * folds * g->grid_h + y;
                if (y < 0 || y >= g->grid_h) continue;
                runs[found++] = (Run){codes + row * g->grid_w * WIDE,
                                      tables + (l * width + from - chunk->left) * rows * ENTRIES, to - from};
            }
            NAME(sums)(runs, found, g->stride_w * WIDE, rows * ENTRIES, sums, more, rows,
                       g->in_channels - wide * WIDE > LANES ? VECTORS : 1);
        }
}

/* Blocks of up to ROWS output channels of a group, for each part of its input channels. Chunks of positions whose
 * tables stay in the first cache are added up one after another, so that no sum depends on how blocks are shared out.
 * Some blocks take a chunk in turn, so that it is read from memory once. */
static TARGET void NAME(weight_blocks)(int64_t start, int64_t stop, void *call) {
    LookUp *g = call;
    const int64_t taps = g->kernel_h * g->kernel_w, folds = CEIL(g->batch, FOLD), lines = folds * g->out_h;
    const int64_t wides = CEIL(g->in_channels, WIDE), blocks = CEIL(g->out_channels, ROWS);
    const int64_t most = FIRST_CACHE / (int64_t)sizeof(float) / ENTRIES / ROWS; /* positions of a chunk */
    const int64_t width = g->out_w < most ? g->out_w : CEIL(g->out_w, CEIL(g->out_w, most)), height = most / width;
    const int64_t scratch = CEIL(wides, g->parts) * taps * ROWS * WIDE, size = height * width * ROWS * ENTRIES;
    int64_t most_blocks = SECOND_CACHE / (int64_t)sizeof(float) / scratch;
    if (most_blocks < 1) most_blocks = 1;
    if (most_blocks > blocks) most_blocks = blocks;
    if (start >= stop) return;
    float *tables = allocate((size + most_blocks * scratch + taps * WIDE) * (int64_t)sizeof(float));
    Run *runs = malloc((size_t)height * sizeof *runs);
    int64_t *tops = malloc((size_t)(2 * height) * sizeof *tops);
    if (tables == NULL || runs == NULL || tops == NULL) {
        g->failed = 1;
        goto done;
    }
    float *sums = tables + size, *filter = sums + most_blocks * scratch;
    NAME(Chunk) chunk = {.tops = tops, .grids = tops + height};
#define FIRST(block) (g->out_channels * (block) / blocks) /* output channel */
    for (int64_t at = start, count; at < stop; at += count) {
        const int64_t group = at / blocks / g->parts, part = at / blocks % g->parts, block = at % blocks;
        const int64_t begin = wides * part / g->parts, end = wides * (part + 1) / g->parts;
        count = blocks - block < most_blocks ? blocks - block : most_blocks;
        if (count > stop - at) count = stop - at;
        for (int64_t line = 0; line < lines; line += height)
            for (int64_t left = 0; left < g->out_w; left += width) {
                chunk.line = line, chunk.left = left;
                chunk.high = line + height < lines ? height : lines - line;
                chunk.right = left + width < g->out_w ? left + width : g->out_w;
                for (int64_t l = 0; l < chunk.high; l++) {
                    tops[l] = (line + l) % g->out_h * g->stride_h;
                    chunk.grids[l] = (group * wides * folds + (line + l) / g->out_h) * g->grid_h;
                }
                for (int64_t b = 0; b < count; b++) {
                    const int64_t o = FIRST(block + b), rows = FIRST(block + b + 1) - o;
                    NAME(position_tables)(g, &chunk, group * g->out_channels + o, (int)rows, tables);
                    NAME(position_sums)(g, &chunk, begin, end, (int)rows, tables, runs, sums + b * scratch,
                                        line > 0 || left > 0);
                }
            }
        for (int64_t b = 0; b < count; b++) {
            const int64_t o = FIRST(block + b), rows = FIRST(block + b + 1) - o;
            for (int64_t r = 0; r < rows; r++)
                for (int64_t wide = begin; wide < end; wide++) {
                    const float *done = sums + b * scratch + (wide - begin) * taps * rows * WIDE;
                    const int64_t first = ((group * g->out_channels + o + r) * g->in_channels + wide * WIDE) * taps;
                    const int64_t here = g->in_channels - wide * WIDE < WIDE ? g->in_channels - wide * WIDE : WIDE;
                    float *to = g->is_bfloat16 ? filter : (float *)g->out + first;
                    for (int64_t c = 0; c < here; c++)
                        for (int64_t tap = 0; tap < taps; tap++) to[c * taps + tap] = done[(tap * rows + r) * WIDE + c];
                    if (g->is_bfloat16) NAME(narrow)(filter, here * taps, (uint16_t *)g->out + first);
                }
        }
    }
#undef FIRST
done:
    free(tables);
    free(runs);
    free(tops);
}
