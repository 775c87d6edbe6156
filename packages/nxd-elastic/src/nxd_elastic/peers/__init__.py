"""Checkpoints in the memory of a job's hosts, which need no disk and outlive their ranks."""
