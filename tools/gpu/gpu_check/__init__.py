"""What `tools/gpu/check.py` measures on a GPU, one module a part, and the ranks that share one device."""
