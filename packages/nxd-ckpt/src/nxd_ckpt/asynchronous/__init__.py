"""Saving in the background: the caller waits for a copy in memory, and a separate process writes it to the disk.

`saving.py` is the entry point. This file imports nothing, so that the writer process does not import torch.
"""
