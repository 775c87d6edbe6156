"""Numbers as a reader wants them."""

GIB = 2**30


def gib(number: float) -> str:
    """Bytes, in GiB or, below one of them, in MiB."""
    if number >= GIB:
        return f"{number / GIB:.1f} GiB"
    mib = number / 2**20
    return f"{mib:.0f} MiB" if mib >= 10 or mib == 0 else f"{mib:.1f} MiB"


def seconds(number: float) -> str:
    """A time."""
    return f"{number:.1f} s" if number >= 10 else f"{number:.3g} s"
