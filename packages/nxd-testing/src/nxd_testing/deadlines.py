"""Deadlines of tests: given for an idle current machine, and scaled to the machine that runs the tests."""

import os


def deadline(seconds: float) -> float:
    """`seconds` times the environment variable NXD_TESTING_SLOWNESS, by default 1.

    A session that measures its machine sets it; all timeouts of `nxd_testing` are scaled by it.
    """
    return seconds * float(os.environ.get("NXD_TESTING_SLOWNESS", "1"))
