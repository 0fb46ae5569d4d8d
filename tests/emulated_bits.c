/* Passes over bits as a program: whether the best instruction set writes the same bytes as the portable kernels. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../qconv/kernels/csrc/binary.h"
#include "../qconv/kernels/csrc/bits.h"

static int64_t below(int64_t count) { return rand() % count; }

int main(int count, char **arguments) {
    static const int64_t sizes[] = {4, 2, 1}, channels[] = {1, 3, 7, 16, 48, 63, 64, 65, 130};
    static const int64_t pixels[] = {1, 2, 5, 16, 17, 49, 513}, widths[] = {1, 2, 4, 8};
    const int64_t best = count > 1 ? atoi(arguments[1]) : PORTABLE;
    for (int round = 0; round < 600; round++) {
        const int64_t operation = below(8), type = below(operation > CLAMP && operation != WHERE_PASSES ? 3 : 2);
        const int64_t groups = operation == CLAMP || operation > WHERE_PASSES ? 1 : 1 + below(3);
        const int64_t bits = operation > WHERE_PASSES ? widths[below(4)] : 1;
        const int64_t c = channels[below(9)], p = pixels[below(7)];
        const int64_t row = operation > WHERE_PASSES ? (c * bits + 7) / 8 : groups * ((c + 63) / 64) * 8;
        const int64_t last = below(2);
        const size_t numbers = (size_t)(2 * groups * c * p), size = numbers * (size_t)sizes[type];
        const size_t packed = (size_t)(2 * p * row);
        char *input = calloc(1, size), *made[2];
        for (size_t i = 0; i < numbers; i++) {
            const float code = (float)below((int64_t)1 << bits);
            uint32_t value = (uint32_t)rand() ^ (uint32_t)rand() << 16;
            if (operation == PACK_CODES && type == IS_BYTE) value = (uint32_t)code;
            if (operation == PACK_CODES && type != IS_BYTE) memcpy(&value, &code, 4);
            if (type == IS_BFLOAT16) value >>= 16;
            memcpy(input + i * (size_t)sizes[type], &value, (size_t)sizes[type]);
        }
        const int seed = rand();
        for (int each = 0; each < 2; each++) {
            char *all = made[each] = calloc(1, size + 2 * packed + 1);
            srand((unsigned)seed);
            for (size_t i = 0; i < 2 * packed; i++) all[size + i] = (char)rand();
            Pass pass = {.input = input, .output = all, .signs = (uint8_t *)all + size, .operation = operation,
                         .passes = (uint8_t *)all + size + packed, .stops = (uint8_t *)all + size + 2 * packed,
                         .type = type, .batch = 2, .channels = c, .groups = groups, .pixels = p, .bits = bits,
                         .channels_last = last, .isa = each ? best : PORTABLE, .low = -1, .high = 1};
            pass_over(&pass, NULL);
        }
        if (memcmp(made[0], made[1], size + 2 * packed + 1)) return printf("operation %d differs\n", (int)operation);
        free(input);
        free(made[0]);
        free(made[1]);
    }
    return 0;
}
