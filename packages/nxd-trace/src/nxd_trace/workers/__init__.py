"""The processes that hold a model's shards: one per rank, started by this package without torchrun."""
