"""Faster training on the CPU: keeping freed memory instead of returning it to the system at every step."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # from glibc's malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep freed blocks; do nothing elsewhere. Return whether it was told.

    By default glibc returns large blocks to the system when they are freed, and each training step then pays for fresh,
    zeroed pages: a ResNet-18 step took up to 1.5 times as long. In return the process never shrinks.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 256 * 2**20))
    told = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(told)
