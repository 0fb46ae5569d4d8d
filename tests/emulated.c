/* Kernels as a program: which one, a call and its operands on standard input, the output on standard output. It lets a
 * machine run the kernels of another one under an emulator. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../qconv/kernels/csrc/binary.h"
#include "../qconv/kernels/csrc/look_up.h"

enum { ADDRESSES = 6, OF_CONV = 26, OF_LOOK_UP = 22 };

int main(void) {
    int64_t which, bytes[ADDRESSES], numbers[OF_CONV]; /* the last address is the output's */
    void *addresses[ADDRESSES];
    if (fread(&which, sizeof which, 1, stdin) != 1 || fread(bytes, sizeof bytes, 1, stdin) != 1) return 2;
    const size_t count = which ? OF_LOOK_UP : OF_CONV;
    if (fread(numbers, sizeof *numbers, count, stdin) != count) return 2;
    for (int i = 0; i < ADDRESSES; i++) {
        addresses[i] = bytes[i] ? calloc(1, (size_t)bytes[i]) : NULL;
        if (bytes[i] && i < ADDRESSES - 1 && fread(addresses[i], (size_t)bytes[i], 1, stdin) != 1) return 2;
    }
    Conv conv = {0};
    LookUp look_up = {0};
    memcpy(&conv, addresses, sizeof addresses);
    memcpy((char *)&conv + offsetof(Conv, batch), numbers, sizeof numbers);
    memcpy(&look_up, addresses, sizeof addresses);
    memcpy((char *)&look_up + offsetof(LookUp, batch), numbers, OF_LOOK_UP * sizeof *numbers);
    int (*const look_ups[])(LookUp *, ParallelFor) = {sign_conv2d, sign_grad_input, sign_grad_weight};
    if (which ? look_ups[which - 1](&look_up, NULL) : convolve(&conv, NULL)) return 3;
    return fwrite(addresses[ADDRESSES - 1], (size_t)bytes[ADDRESSES - 1], 1, stdout) != 1;
}
