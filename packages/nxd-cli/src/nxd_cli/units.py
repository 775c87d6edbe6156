"""Formats numbers for people: times, memory and counts."""


def show_duration(seconds: float) -> str:
    """Format a duration, as in "0:07", "12:34" or "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_seconds(seconds: float) -> str:
    """Format seconds with three digits, as in "0.0417 s", or as "21.8 s" from ten on."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.3g} s"


def show_memory(num_bytes: float) -> str:
    """Format bytes, as in "1.4 GiB", "512 MiB" below 1 GiB, or "1.4 MiB" below 10 MiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    mib = num_bytes / 2**20
    return f"{mib:.0f} MiB" if mib >= 10 or mib == 0 else f"{mib:.1f} MiB"


def show_count(count: float) -> str:
    """Format a count, as in "950", "12.3k", "4.10M" or "1.20B"."""
    for limit, divisor, form in ((1e3, 1, "{:.0f}"), (1e6, 1e3, "{:.1f}k"), (1e9, 1e6, "{:.2f}M")):
        if count < limit:
            return form.format(count / divisor)
    return f"{count / 1e9:.2f}B"
