"""Hides work from the caller's dispatch modes, such as selective checkpointing's, which replay what they saw.

Who drives a step, the caller or the thread, is a matter of timing, and what is remembered is done only once: a mode
that saw either would see something else the next time.
"""

import torch

any_mode = torch._C._len_torch_dispatch_stack  # how many there are: asking is cheaper than the context
OutsideOfModes = torch._C._DisableTorchDispatch  # a context
