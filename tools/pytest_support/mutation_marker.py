"""The call that `tools/mutate.py reach` writes at the place of each mutation: it notes that the place was reached.

Every interpreter of the environment installs it as a builtin when it starts, so it works in ranks, forked programs and
threads, and marked sources need no import.
"""

import builtins
import os

# Bound here: tests replace functions of os.
_open, _close, _utime, _environ = os.open, os.close, os.utime, os.environ


def install(folder: str) -> None:
    """Make `__nxd_reached__(number)` write the empty file `folder/<worker of pytest-xdist, or main>/<number>`."""

    def reached(number: int) -> bool:
        try:
            path = f"{folder}/{_environ.get('PYTEST_XDIST_WORKER', 'main')}/{number}"
            _close(_open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            _utime(path)  # an old file, too, says when the place was reached last
        except Exception:  # the code around must behave as without the marker
            pass
        return False

    reached._dynamo_marked_constant = True  # type: ignore[attr-defined] # the compiler calls it where it meets it
    builtins.__nxd_reached__ = reached  # type: ignore[attr-defined]
