"""The exceptions of this package that are not ValueErrors, and how errors are told."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found, understood or read; nothing complete was harmed."""

    user_can_mend = True  # command lines show its message without a traceback


def one_line(error: BaseException) -> str:
    """Type and first line of an error, as other ranks are told it. Names of files in it may be no Unicode."""
    text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Names come from files, messages from processes: what could move the cursor or break a line is escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class RanksLostError(CheckpointError):
    """Other ranks did not answer. This is no fault of the checkpoint, so falling back to another one would not help."""
