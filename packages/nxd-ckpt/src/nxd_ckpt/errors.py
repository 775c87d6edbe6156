"""The exceptions of this package that are not ValueErrors."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found, understood or read; nothing complete was harmed."""


class RanksLostError(CheckpointError):
    """Other ranks did not answer. This is no fault of the checkpoint, so falling back to another one would not help."""
