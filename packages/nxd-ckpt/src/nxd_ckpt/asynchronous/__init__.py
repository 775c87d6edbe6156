"""Saving in the background: the caller waits for a copy in memory, a process of its own brings it to the disk.

`saving.py` is the way in. This file imports nothing, so that the writer process need not import torch.
"""
