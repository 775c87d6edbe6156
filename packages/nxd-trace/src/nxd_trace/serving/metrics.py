"""A server's counters, in Prometheus's text format."""

import threading
from collections import Counter
from collections.abc import Mapping


class ServerMetrics:
    """Counts requests, tokens and seconds; for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[int] = Counter()
        self._tokens: Counter[str] = Counter()
        self._seconds = 0.0

    def count_request(self, status: int, seconds: float) -> None:
        """A request that was answered with this status, after so long."""
        with self._lock:
            self._requests[status] += 1
            self._seconds += seconds

    def count_tokens(self, *, prompt: int = 0, written: int = 0) -> None:
        """Tokens taken and given."""
        with self._lock:
            self._tokens.update(prompt=prompt, written=written)

    def text(self, sequences: Mapping[str, int]) -> str:
        """All counts.

        Args:
            sequences: how many there are in each state, such as waiting.
        """
        with self._lock:
            lines = ["# TYPE nxd_requests_total counter"]
            lines += [f'nxd_requests_total{{status="{status}"}} {n}' for status, n in sorted(self._requests.items())]
            lines += ["# TYPE nxd_request_seconds summary", f"nxd_request_seconds_sum {self._seconds:.6f}"]
            lines += [f"nxd_request_seconds_count {self._requests.total()}", "# TYPE nxd_tokens_total counter"]
            lines += [f'nxd_tokens_total{{kind="{kind}"}} {self._tokens[kind]}' for kind in ("prompt", "written")]
        lines += ["# TYPE nxd_sequences gauge"]
        lines += [f'nxd_sequences{{state="{state}"}} {number}' for state, number in sequences.items()]
        return "\n".join(lines) + "\n"
