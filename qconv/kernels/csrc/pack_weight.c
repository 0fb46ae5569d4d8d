/* The signs of a weight as bits.
 *
 * Comparing vectors of neighbouring floats gives their bits in a row. With the channels last these are the words.
 * Otherwise a row holds all taps of a channel after another, and squares of 8 channels and 8 taps are transposed.
 */
#include "pack_weight.h"

#include <string.h>

#include "sixteen.h"

enum { BLOCK = 8 };

/* Bit i of byte j becomes bit j of byte i. */
INLINE uint64_t transposed(uint64_t x) {
    uint64_t y = (x ^ x >> 7) & 0x00aa00aa00aa00aau;
    x ^= y ^ y << 7;
    y = (x ^ x >> 14) & 0x0000cccc0000ccccu;
    x ^= y ^ y << 14;
    y = (x ^ x >> 28) & 0x00000000f0f0f0f0u;
    return x ^ y ^ y << 28;
}

/* The words of up to 64 channels, from the bits (channels, taps), which 8 more bytes follow. */
INLINE void columns(const uint64_t *bits, int64_t channels, int64_t taps, uint64_t *words) {
    for (int64_t tap = 0; tap < taps; tap += 8) {
        const int64_t count = taps - tap < 8 ? taps - tap : 8;
        uint64_t found[8] = {0};
        for (int64_t first = 0; first < channels; first += 8) {
            uint64_t square = 0;
            for (int64_t i = 0; i < 8 && first + i < channels; i++) {
                const int64_t place = (first + i) * taps + tap;
                uint64_t row;
                memcpy(&row, (const char *)bits + place / 8, sizeof row);
                square |= (row >> place % 8 & 255) << 8 * i;
            }
            square = transposed(square);
            for (int j = 0; j < 8; j++) found[j] |= (square >> 8 * j & 255) << first;
        }
        memcpy(words + tap, found, (size_t)count * sizeof *found);
    }
}

#define ROWS "pack_weight_rows.h"
#include "each_isa.h"
DISPATCH(Packing, blocks, portable)

int pack_weight(Packing *packing, ParallelFor parallel_for) {
    return share_out(parallel_for, packing->groups * packing->blocks, packing->grain, blocks, packing);
}
