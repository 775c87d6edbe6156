"""Numbers as a person reads them: durations, memory and counts of tokens."""

from __future__ import annotations


def show_duration(seconds: float) -> str:
    """As in "0:07", "12:34" or "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_memory(num_bytes: int) -> str:
    """As in "512 MiB" below one GiB, "1.4 GiB" from there on."""
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"


def show_count(count: float) -> str:
    """As in "950", "12.3k", "4.10M" or "1.20B"."""
    for limit, divisor, form in ((1e3, 1, "{:.0f}"), (1e6, 1e3, "{:.1f}k"), (1e9, 1e6, "{:.2f}M")):
        if count < limit:
            return form.format(count / divisor)
    return f"{count / 1e9:.2f}B"
