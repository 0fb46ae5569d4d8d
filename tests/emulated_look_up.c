/* The look-up as a program: which one, a call and its operands on standard input, the result on standard output. */
#include <stdio.h>

#include "../qconv/kernels/csrc/look_up.c"

int main(void) {
    int64_t which, bytes[LOOK_UP_ADDRESSES], numbers[LOOK_UP_NUMBERS]; /* the last address is the result's */
    void *addresses[LOOK_UP_ADDRESSES];
    if (fread(&which, sizeof which, 1, stdin) != 1 || fread(bytes, sizeof bytes, 1, stdin) != 1 ||
        fread(numbers, sizeof numbers, 1, stdin) != 1)
        return 2;
    for (int i = 0; i < LOOK_UP_ADDRESSES; i++) {
        addresses[i] = bytes[i] ? malloc((size_t)bytes[i]) : NULL;
        if (bytes[i] && i < LOOK_UP_ADDRESSES - 1 && fread(addresses[i], (size_t)bytes[i], 1, stdin) != 1) return 2;
    }
    int (*const kernels[])(LookUp *, int64_t, ParallelFor) = {look_up_grad_input, look_up_grad_weight,
                                                              look_up_convolve};
    LookUp call = look_up_of(addresses, numbers);
    if (kernels[which](&call, 1, NULL)) return 3;
    return fwrite(addresses[LOOK_UP_ADDRESSES - 1], (size_t)bytes[LOOK_UP_ADDRESSES - 1], 1, stdout) != 1;
}
