/* The kernels over one instruction set: included once for each, with NAME, TARGET, Sum, WEIGHT, FLUSH_AFTER and
 * clear, load, add, flush, store, store2, below, sixteen and stream. */

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
        for (int b = 0; b < blocks; b += 2) {
            int32_t *to = out + (p * blocks + b) * BLOCK;
            NAME(flush)(&sums[p][b]);
            if (b + 1 < blocks) {
                NAME(flush)(&sums[p][b + 1]);
                NAME(store2)(&sums[p][b], to);
            } else {
                NAME(store)(&sums[p][b], to);
            }
        }
}

/* What becomes of the popcounts of a row of the output, for some blocks of channels. */
INLINE TARGET void NAME(finish)(const Conv *conv, const int32_t *counts, int64_t image, int64_t row, int64_t group,
                                int64_t block, int blocks) {
    const int64_t padded = conv->blocks * BLOCK, first = block * BLOCK, tail = conv->out_channels - first;
    const int count = tail < blocks * BLOCK ? (int)tail : blocks * BLOCK, whole = count == blocks * BLOCK;
    const int64_t channel = group * conv->out_channels + first, width = conv->out_w;
    const int64_t place = (image * conv->out_h + row) * width, step = conv->groups * padded;
    const int32_t *kinds = conv->column_class;
    const int32_t *bases = conv->base + conv->row_class[row] * conv->column_classes * step + group * padded + first;
    const Ints8 *differ = (const Ints8 *)counts;
    const int64_t channels = conv->groups * conv->out_channels, start = place * channels + channel;
    if (conv->is_scaled && whole) {
        float *out = (float *)conv->output + start;
        if (blocks % 2 == 0) {
            Floats16 scale[MOST_BLOCKS / 2], bias[MOST_BLOCKS / 2];
            memcpy(scale, conv->scale + channel, (size_t)blocks * BLOCK * sizeof(float));
            memcpy(bias, conv->bias + channel, (size_t)blocks * BLOCK * sizeof(float));
            const Ints16 *differ16 = (const Ints16 *)counts;
            for (int64_t p = 0; p < width; p++, out += channels, differ16 += blocks / 2) {
                const Ints16 *base = (const Ints16 *)(bases + kinds[p] * step);
                for (int b = 0; b < blocks / 2; b++) {
                    const Floats16 acc = __builtin_convertvector(base[b] - 2 * differ16[b], Floats16);
                    const Floats16 value = acc * scale[b] + bias[b];
                    if (conv->past_caches)
                        NAME(stream)(out + b * 2 * BLOCK, &value);
                    else
                        *(Floats16 *)(out + b * 2 * BLOCK) = value;
                }
            }
            return;
        }
        for (int64_t p = 0; p < width; p++, out += channels, differ += blocks) {
            const Ints8 *base = (const Ints8 *)(bases + kinds[p] * step);
            for (int b = 0; b < blocks; b++)
                *(Floats8 *)(out + b * BLOCK) = __builtin_convertvector(base[b] - 2 * differ[b], Floats8) *
                                                    ((const Floats8 *)(conv->scale + channel))[b] +
                                                ((const Floats8 *)(conv->bias + channel))[b];
        }
        return;
    }
    for (int64_t p = 0; p < width; p++, counts += blocks * BLOCK) {
        const int32_t *base = bases + kinds[p] * step;
        for (int c = 0; c < count; c++) {
            const int32_t acc = base[c] - 2 * counts[c];
            if (!conv->is_scaled)
                ((int32_t *)conv->output)[start + p * channels + c] = acc;
            else
                ((float *)conv->output)[start + p * channels + c] =
                    (float)acc * conv->scale[channel + c] + conv->bias[channel + c];
        }
    }
}

/* The popcounts of a row of the output, (out_w, blocks * BLOCK), then what becomes of them. */
static TARGET void NAME(row)(const Conv *conv, const uint64_t *x, const uint64_t *weight, int64_t image, int64_t row,
                             int64_t group, int64_t block, int blocks, int32_t *counts) {
    const int64_t next = conv->stride_w * conv->groups * conv->words;
    const int follow = conv->groups == 1 && conv->dilation_w == 1;
    const int64_t rows = conv->kernel_h, run = follow ? conv->kernel_w * conv->words : conv->words;
    int64_t column = 0;
#define TILE(rows, run, pixels, blocks)                                                                               \
    do {                                                                                                              \
        NAME(tile)(conv, x + column * next, weight, rows, run, pixels, blocks, counts + column * (blocks) * BLOCK);   \
        column += pixels;                                                                                             \
    } while (0)
    if (blocks == MOST_BLOCKS) {
        if (rows == 3 && run == 3)
            while (column + 4 <= conv->out_w) TILE(3, 3, 4, MOST_BLOCKS);
        while (column + 4 <= conv->out_w) TILE(rows, run, 4, MOST_BLOCKS);
        if (column + 2 <= conv->out_w) TILE(rows, run, 2, MOST_BLOCKS);
        if (column < conv->out_w) TILE(rows, run, 1, MOST_BLOCKS);
        NAME(finish)(conv, counts, image, row, group, block, MOST_BLOCKS);
    } else {
        while (column + 4 <= conv->out_w) TILE(rows, run, 4, 1);
        while (column < conv->out_w) TILE(rows, run, 1, 1);
        NAME(finish)(conv, counts, image, row, group, block, 1);
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
static TARGET void NAME(conv_rows)(Conv *conv, int64_t start, int64_t stop) {
    const int64_t pixel = conv->groups * conv->words, line = conv->padded_w * pixel;
    const int64_t weight_block = conv->kernel_h * conv->kernel_w * conv->words * BLOCK;
    const int is_padded = conv->padded_h != conv->height || conv->padded_w != conv->width;
    const size_t own = conv->is_float ? (size_t)(conv->height * conv->width * pixel) : 0;
    const size_t framed = is_padded ? (size_t)(conv->padded_h * line) : 0;
    if (start >= stop) return;
    const size_t counted = (size_t)(conv->out_w * MOST_BLOCKS * BLOCK) * sizeof(int32_t) / sizeof(uint64_t);
    uint64_t *bits = malloc((own + framed + counted) * sizeof *bits), *frame = bits + own;
    if (bits == NULL) {
        conv->failed = 1;
        return;
    }
    int32_t *counts = (int32_t *)(frame + framed);
    const int64_t picture_bytes =
        conv->height * conv->width * conv->groups * conv->in_channels * (int64_t)sizeof(float);
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
        /* The next picture comes into the cache while this one is computed. */
        const char *coming = (const char *)conv->input + (image + 1) * picture_bytes;
        const int64_t parts = conv->groups * ((conv->blocks + MOST_BLOCKS - 1) / MOST_BLOCKS) * (last - first);
        const int64_t part = conv->is_float && start + last - first < stop ? picture_bytes / parts + 1 : 0;
        const char *end = coming + (part ? picture_bytes : 0);
        for (int64_t group = 0; group < conv->groups; group++)
            for (int64_t block = 0; block < conv->blocks;) {
                const int blocks = conv->blocks - block >= MOST_BLOCKS ? MOST_BLOCKS : 1;
                const uint64_t *weight = conv->weight + (group * conv->blocks + block) * weight_block;
                for (int64_t row = first; row < last; row++) {
                    for (const char *stop_at = coming + part; coming < stop_at && coming < end; coming += 64)
                        __builtin_prefetch(coming, 0, 2);
                    NAME(row)(conv, picture + row * conv->stride_h * line + group * conv->words, weight, image, row,
                              group, block, blocks, counts);
                }
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
