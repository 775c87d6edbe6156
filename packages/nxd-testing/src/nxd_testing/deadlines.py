"""Deadlines of tests: given for an idle machine of today, and scaled to the one that the tests run on."""

import os


def deadline(seconds: float) -> float:
    """`seconds` times the environment variable NXD_TESTING_SLOWNESS, which is 1 where it is not set.

    A session that measures its machine sets it; all timeouts of `nxd_testing` are scaled by it.
    """
    return seconds * float(os.environ.get("NXD_TESTING_SLOWNESS", "1"))
