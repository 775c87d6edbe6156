"""Why a rank that is waited for may never come: it has left the group, its process has ended, or its time is over."""

from nxd_state.shared_memory.channel import Awaited, Channel, SharedMemoryError


def check_peers(channel: Channel, awaited: Awaited, seconds: float, *, thorough: bool) -> SharedMemoryError | None:
    """What to raise on a rank that has waited for `seconds`, if anything.

    Args:
        channel: of the group.
        awaited: what it waits for.
        seconds: how long.
        thorough: whether to look at the peers' processes as well, which takes some microseconds each.
    """
    reason = channel.reason_of_leaver(awaited)
    if reason is not None:
        return SharedMemoryError(reason)
    if not thorough:
        return None
    missing = channel.missing(awaited)
    for peer in missing:
        process = channel.process(peer)
        if process.condition() == "has ended":
            return SharedMemoryError(
                f"rank {channel.ranks[peer]} is gone from {channel.title}: its process {process.pid} has ended while "
                f"rank {channel.ranks[channel.rank]} waited for it; see what that rank printed"
            )
    if missing and seconds > channel.timeout:
        peer = missing[0]
        process = channel.process(peer)
        return SharedMemoryError(
            f"rank {channel.ranks[peer]} of {channel.title} did not come to what rank {channel.ranks[channel.rank]} "
            f"waits for in {channel.timeout:g} s: its process {process.pid} {process.condition()}; "
            "initialize_model_parallel(timeout=...) sets how long to wait"
        )
    return None
