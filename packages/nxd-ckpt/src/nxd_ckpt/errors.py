"""The one exception of this package that is not a ValueError."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found, understood or read; nothing complete was harmed."""
