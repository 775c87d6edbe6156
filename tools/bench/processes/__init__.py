"""Processes that benchmarks measure in, one per rank, and what runs beside them."""
