"""The clock: checkpoints are ordered and file locks judged by it, and certificates of object stores checked."""

import time

from nxd_trainer.doctor.finding import Finding, ok, wrong

EARLIEST = 1_735_689_600  # 2025-01-01: before any of these packages


def check_clock(now: float, monotonic: tuple[float, float]) -> Finding:
    """Whether the time is possible, and time passes.

    Args:
        now: seconds since 1970.
        monotonic: two readings of the monotonic clock, one after the other.
    """
    name = "clock"
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < EARLIEST:
        return wrong(name, f"{shown}, which is in the past", "set the clock, and keep it so: timedatectl set-ntp true")
    if monotonic[1] < monotonic[0]:
        return wrong(name, "the monotonic clock runs backwards", "restart the host; its time source is broken")
    return ok(name, shown)


def read_clock() -> tuple[float, tuple[float, float]]:
    """What `check_clock` takes."""
    return time.time(), (time.monotonic(), time.monotonic())
