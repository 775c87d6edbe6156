"""The server's metrics, in Prometheus's text format."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

_RATE_WINDOW_SECONDS = 10.0
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServerMetrics:
    """Counts requests, tokens and seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: Counter[int] = Counter()
        self._tokens: Counter[str] = Counter()
        self._seconds = 0.0
        self._first_tokens: Counter[float] = Counter()  # by the bucket's upper bound
        self._first_token_seconds = 0.0
        self._recent: deque[tuple[float, int]] = deque()  # times and numbers of generated tokens

    def count_request(self, status: int, seconds: float) -> None:
        """Count a request by its status and duration."""
        with self._lock:
            self._requests[status] += 1
            self._seconds += seconds

    def count_tokens(self, *, prompt: int = 0, written: int = 0) -> None:
        """Count prompt tokens and generated tokens."""
        with self._lock:
            self._tokens.update(prompt=prompt, written=written)
            if written:
                self._recent.append((self._clock(), written))
                self._drop_old()

    def count_first_token(self, seconds: float) -> None:
        """Count a request's time to its first token."""
        with self._lock:
            bound = next((it for it in _FIRST_TOKEN_BUCKETS if seconds <= it), float("inf"))
            self._first_tokens[bound] += 1
            self._first_token_seconds += seconds

    def text(self, sequences: Mapping[str, int], draft_tokens: Mapping[str, int]) -> str:
        """Return all metrics.

        Args:
            sequences: number of sequences by state, such as waiting.
            draft_tokens: number of a draft model's tokens by kind: proposed and accepted.
        """
        with self._lock:
            self._drop_old()
            rate = sum(number for _, number in self._recent) / _RATE_WINDOW_SECONDS
            lines = ["# TYPE nxd_requests_total counter"]
            lines += [f'nxd_requests_total{{status="{status}"}} {n}' for status, n in sorted(self._requests.items())]
            lines += ["# TYPE nxd_request_seconds summary", f"nxd_request_seconds_sum {self._seconds:.6f}"]
            lines += [f"nxd_request_seconds_count {self._requests.total()}", "# TYPE nxd_tokens_total counter"]
            lines += [f'nxd_tokens_total{{kind="{kind}"}} {self._tokens[kind]}' for kind in ("prompt", "written")]
            lines += ["# TYPE nxd_tokens_per_second gauge", f"nxd_tokens_per_second {rate:.3f}"]
            lines += self._first_token_lines()
        lines += ["# TYPE nxd_draft_tokens_total counter"]
        lines += [f'nxd_draft_tokens_total{{kind="{kind}"}} {number}' for kind, number in draft_tokens.items()]
        lines += ["# TYPE nxd_sequences gauge"]
        lines += [f'nxd_sequences{{state="{state}"}} {number}' for state, number in sequences.items()]
        return "\n".join(lines) + "\n"

    def _first_token_lines(self) -> list[str]:
        lines, number = ["# TYPE nxd_time_to_first_token_seconds histogram"], 0
        for bound in _FIRST_TOKEN_BUCKETS:
            number += self._first_tokens[bound]
            lines.append(f'nxd_time_to_first_token_seconds_bucket{{le="{bound:g}"}} {number}')
        total = self._first_tokens.total()
        lines.append(f'nxd_time_to_first_token_seconds_bucket{{le="+Inf"}} {total}')
        lines.append(f"nxd_time_to_first_token_seconds_sum {self._first_token_seconds:.6f}")
        return [*lines, f"nxd_time_to_first_token_seconds_count {total}"]

    def _drop_old(self) -> None:
        now = self._clock()
        while self._recent and now - self._recent[0][0] > _RATE_WINDOW_SECONDS:
            self._recent.popleft()
