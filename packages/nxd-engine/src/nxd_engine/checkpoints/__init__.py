"""Checkpoints of a model, its optimizer and the state of its run, by the calls of the documented API."""
