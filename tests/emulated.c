/* The kernels as a program: a call and its operands on standard input, the output on standard output. It lets a machine
 * run the kernels of another one under an emulator. */

#include <stdio.h>

#include "../qconv/kernels/csrc/binary.c"

int main(void) {
    int64_t bytes[ADDRESSES], numbers[NUMBERS]; /* the last address is the output's */
    void *addresses[ADDRESSES];
    if (fread(bytes, sizeof bytes, 1, stdin) != 1 || fread(numbers, sizeof numbers, 1, stdin) != 1) return 2;
    for (int i = 0; i < ADDRESSES; i++) {
        addresses[i] = bytes[i] ? calloc(1, (size_t)bytes[i]) : NULL;
        if (bytes[i] && i < ADDRESSES - 1 && fread(addresses[i], (size_t)bytes[i], 1, stdin) != 1) return 2;
    }
    Conv conv = conv_of(addresses, numbers);
    if (convolve(&conv, 0, NULL)) return 3;
    return fwrite(addresses[ADDRESSES - 1], (size_t)bytes[ADDRESSES - 1], 1, stdout) != 1;
}
