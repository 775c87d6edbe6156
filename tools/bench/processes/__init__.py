"""Processes that benchmarks measure in, one per rank."""
