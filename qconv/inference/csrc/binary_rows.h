/* The kernels over one instruction set: included once for each, with NAME, TARGET, Sum, WEIGHT, FLUSH_AFTER and
 * clear, load, add, flush and store. */

/* A tile of pixels × blocks of 8 channels. Its size is known when it is inlined, and for the most common kernel the
 * number of its rows, and of words that follow each other in a row of the input. */
INLINE TARGET void NAME(tile)(const Conv *conv, const uint64_t *x, const uint64_t *weight, int64_t rows, int64_t run,
                              int pixels, int blocks, int32_t *out) {
    Sum sums[MOST_PIXELS][MOST_BLOCKS];
    for (int p = 0; p < pixels; p++)
        for (int b = 0; b < blocks; b++) NAME(clear)(&sums[p][b]);
    const int64_t pixel = conv->groups * conv->words, next = conv->stride_w * pixel;
    const int64_t weight_block = conv->kernel_h * conv->kernel_w * conv->words * BLOCK;
    const int64_t runs = conv->kernel_w * conv->words / run;
    int since_flush = 0;
    (void)since_flush;
#pragma GCC unroll 1 /* else gcc keeps all taps in registers at once, and spills */
    for (int64_t row = 0; row < rows; row++) {
        const uint64_t *line = x + row * conv->dilation_h * conv->padded_w * pixel;
        for (int64_t part = 0; part < runs; part++, line += conv->dilation_w * pixel) {
            const uint64_t *at = line;
#pragma GCC unroll 1
            for (int64_t word = 0; word < run; word++, at++, weight += BLOCK) {
                WEIGHT w[MOST_BLOCKS];
                for (int b = 0; b < blocks; b++) w[b] = NAME(load)(weight + b * weight_block);
                for (int p = 0; p < pixels; p++)
                    for (int b = 0; b < blocks; b++) NAME(add)(&sums[p][b], w[b], at[p * next]);
#if FLUSH_AFTER
                if (++since_flush == FLUSH_AFTER) {
                    for (int p = 0; p < pixels; p++)
                        for (int b = 0; b < blocks; b++) NAME(flush)(&sums[p][b]);
                    since_flush = 0;
                }
#endif
            }
        }
    }
    for (int p = 0; p < pixels; p++)
        for (int b = 0; b < blocks; b++) {
            NAME(flush)(&sums[p][b]);
            NAME(store)(&sums[p][b], out + (p * MOST_BLOCKS + b) * BLOCK);
        }
}

/* What becomes of the popcounts of a tile. */
INLINE TARGET void NAME(finish)(const Conv *conv, const int32_t *counts, int64_t image, int64_t row, int64_t column,
                                int64_t group, int64_t block, int pixels, int blocks) {
    const int64_t padded = conv->blocks * BLOCK, channels = conv->groups * conv->out_channels;
    const int64_t first = block * BLOCK, tail = conv->out_channels - first;
    const int count = tail < blocks * BLOCK ? (int)tail : blocks * BLOCK, whole = count == blocks * BLOCK;
    const int64_t channel = group * conv->out_channels + first;
    const int64_t place = (image * conv->out_h + row) * conv->out_w + column;
    Ints8 accs[MOST_PIXELS][MOST_BLOCKS];
    for (int p = 0; p < pixels; p++) {
        const int64_t kind = conv->row_class[row] * conv->column_classes + conv->column_class[column + p];
        const Ints8 *base = (const Ints8 *)(conv->base + (kind * conv->groups + group) * padded + first);
        const Ints8 *count8 = (const Ints8 *)(counts + p * MOST_BLOCKS * BLOCK);
        for (int b = 0; b < blocks; b++) accs[p][b] = base[b] - 2 * count8[b];
    }
    if (conv->mode == TO_BITS) {
        const int32_t *threshold = conv->threshold + group * padded + first;
        for (int p = 0; p < pixels; p++) {
            uint8_t *bytes = (uint8_t *)conv->output + (place + p) * conv->out_words * 8 + channel / 8;
            for (int b = 0; b < blocks; b++) {
                const int channels_left = whole ? BLOCK : count - b * BLOCK; /* others are +1: a bit of 0 */
                const int below = NAME(below)((const int32_t *)&accs[p][b], threshold + b * BLOCK);
                bytes[b] = (uint8_t)(below & ((1 << channels_left) - 1));
            }
        }
        return;
    }
    for (int p = 0; p < pixels; p++) {
        const int64_t at = (place + p) * channels + channel;
        if (conv->mode == TO_INT32) {
            memcpy((int32_t *)conv->output + at, accs[p], (size_t)count * sizeof(int32_t));
        } else if (whole) {
            for (int b = 0; b < blocks; b++) {
                const Floats8 scale = *(const Floats8 *)(conv->scale + channel + b * BLOCK);
                const Floats8 bias = *(const Floats8 *)(conv->bias + channel + b * BLOCK);
                *(Floats8 *)((float *)conv->output + at + b * BLOCK) =
                    __builtin_convertvector(accs[p][b], Floats8) * scale + bias;
            }
        } else {
            const int32_t *acc = (const int32_t *)accs[p];
            for (int c = 0; c < count; c++)
                ((float *)conv->output)[at + c] = (float)acc[c] * conv->scale[channel + c] + conv->bias[channel + c];
        }
    }
}

static TARGET void NAME(row)(const Conv *conv, const uint64_t *x, const uint64_t *weight, int64_t image, int64_t row,
                             int64_t group, int64_t block, int blocks) {
    int32_t counts[MOST_PIXELS * MOST_BLOCKS * BLOCK];
    const int64_t next = conv->stride_w * conv->groups * conv->words;
    const int follow = conv->groups == 1 && conv->dilation_w == 1;
    const int64_t rows = conv->kernel_h, run = follow ? conv->kernel_w * conv->words : conv->words;
    int64_t column = 0;
#define TILE(rows, run, pixels, blocks)                                                \
    do {                                                                               \
        NAME(tile)(conv, x + column * next, weight, rows, run, pixels, blocks, counts); \
        NAME(finish)(conv, counts, image, row, column, group, block, pixels, blocks);  \
        column += pixels;                                                              \
    } while (0)
    if (blocks == MOST_BLOCKS) {
        if (rows == 3 && run == 3)
            while (column + 4 <= conv->out_w) TILE(3, 3, 4, MOST_BLOCKS);
        while (column + 4 <= conv->out_w) TILE(rows, run, 4, MOST_BLOCKS);
        if (column + 2 <= conv->out_w) TILE(rows, run, 2, MOST_BLOCKS);
        if (column < conv->out_w) TILE(rows, run, 1, MOST_BLOCKS);
    } else {
        while (column + 4 <= conv->out_w) TILE(rows, run, 4, 1);
        while (column < conv->out_w) TILE(rows, run, 1, 1);
    }
#undef TILE
}

/* Signs of `count` pixels of an image, from `first` on, as bits. */
static TARGET void NAME(pack)(const Conv *conv, int64_t image, int64_t first, int64_t count, uint64_t *out) {
    const int64_t step = conv->groups * conv->words, all = conv->groups * conv->in_channels;
    const int64_t plane = conv->height * conv->width;
    for (int64_t index = 0; index < step; index++) {
        const int64_t word = index % conv->words, left = conv->in_channels - word * 64;
        const int64_t channel = index / conv->words * conv->in_channels + word * 64, channels = left < 64 ? left : 64;
        if (conv->channels_last) {
            const float *in = (const float *)conv->input + (image * plane + first) * all + channel;
            for (int64_t p = 0; p < count; p++, in += all) {
                uint64_t bits = 0;
                int64_t c = 0;
                for (; c + 16 <= channels; c += 16) bits |= NAME(sixteen)(in + c) << c;
                for (; c < channels; c++) bits |= (uint64_t)(in[c] < 0) << c;
                out[p * step + index] = bits;
            }
        } else {
            for (int64_t start = 0; start < count; start += 64) {
                const int64_t strip = count - start < 64 ? count - start : 64;
                const float *in = (const float *)conv->input + (image * all + channel) * plane + first + start;
                uint64_t bits[64] = {0};
                for (int64_t c = 0; c < channels; c++, in += plane) {
                    int64_t p = 0;
                    for (; p + 8 <= strip; p += 8)
                        for (int i = 0; i < 8; i++) bits[p + i] |= (uint64_t)(in[p + i] < 0) << c;
                    for (; p < strip; p++) bits[p] |= (uint64_t)(in[p] < 0) << c;
                }
                for (int64_t p = 0; p < strip; p++) out[(start + p) * step + index] = bits[p];
            }
        }
    }
}

/* Rows of the output, counted over all images. */
static TARGET void NAME(rows)(Conv *conv, int64_t start, int64_t stop) {
    const int64_t pixel = conv->groups * conv->words, line = conv->padded_w * pixel;
    const int64_t weight_block = conv->kernel_h * conv->kernel_w * conv->words * BLOCK;
    const int is_padded = conv->padded_h != conv->height || conv->padded_w != conv->width;
    const size_t own = conv->is_float ? (size_t)(conv->height * conv->width * pixel) : 0;
    const size_t framed = is_padded ? (size_t)(conv->padded_h * line) : 0;
    if (start >= stop) return;
    uint64_t *bits = malloc((own + framed + 1) * sizeof *bits), *frame = bits + own;
    if (bits == NULL) {
        conv->failed = 1;
        return;
    }
    memset(frame, 0, framed * sizeof *frame);
    while (start < stop) {
        const int64_t image = start / conv->out_h, first = start % conv->out_h;
        const int64_t last = first + (stop - start) < conv->out_h ? first + (stop - start) : conv->out_h;
        int64_t from = first * conv->stride_h - conv->top;
        int64_t to = (last - 1) * conv->stride_h + (conv->kernel_h - 1) * conv->dilation_h - conv->top + 1;
        if (from < 0) from = 0;
        if (to > conv->height) to = conv->height;
        const uint64_t *picture = bits;
        if (!conv->is_float)
            picture = (const uint64_t *)conv->input + image * conv->height * conv->width * pixel;
        else if (from < to)
            NAME(pack)(conv, image, from * conv->width, (to - from) * conv->width, bits + from * conv->width * pixel);
        if (is_padded) {
            for (int64_t y = from; y < to; y++)
                memcpy(frame + (y + conv->top) * line + conv->left * pixel, picture + y * conv->width * pixel,
                       (size_t)(conv->width * pixel) * sizeof *frame);
            picture = frame;
        }
        for (int64_t group = 0; group < conv->groups; group++)
            for (int64_t block = 0; block < conv->blocks;) {
                const int blocks = conv->blocks - block >= MOST_BLOCKS ? MOST_BLOCKS : 1;
                const uint64_t *weight = conv->weight + (group * conv->blocks + block) * weight_block;
                for (int64_t row = first; row < last; row++)
                    NAME(row)(conv, picture + row * conv->stride_h * line + group * conv->words, weight, image, row, group, block, blocks);
                block += blocks;
            }
        start += last - first;
    }
    free(bits);
}

#undef NAME
#undef TARGET
#undef Sum
#undef WEIGHT
#undef FLUSH_AFTER
