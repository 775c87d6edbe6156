"""Keeps the descriptors of standard input, output and error taken, in programs that were started with some closed.

Otherwise the next file, socket or shared memory that is opened becomes one of them: a child process replaces it by its
own, and what libraries print lands in it. nxd-ckpt, which imports no sibling, has the same in its `files.py`.
"""

import os


def hold_standard_streams() -> None:
    """Open the null device for those of descriptors 0 to 2 that are closed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            if opened > 2:  # another thread was faster
                os.close(opened)
            else:
                os.set_inheritable(opened, True)
