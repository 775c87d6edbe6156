"""Small training programs in plain PyTorch, one per kind of parallelism, each with switchable faults."""
