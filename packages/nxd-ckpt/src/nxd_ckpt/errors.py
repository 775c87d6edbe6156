"""The exceptions of this package that are not ValueErrors."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found, understood or read; nothing complete was harmed."""


class RanksLostError(CheckpointError):
    """Other ranks could not be heard: this says nothing of any checkpoint, so another one would not do better."""
