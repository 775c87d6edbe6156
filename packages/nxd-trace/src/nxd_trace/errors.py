"""Errors of traced models and of their server, besides invalid arguments."""

from dataclasses import KW_ONLY, dataclass


class WorkerError(RuntimeError):
    """A worker process raised, died, or waited for one that did; the message contains its traceback."""


class ModelFolderError(ValueError):
    """A saved model cannot be loaded: it is damaged, incomplete, or made for another platform."""


class MissingMainGuardError(WorkerError):
    """A script traced a model while a worker imported it, because it lacks `if __name__ == "__main__":`."""


@dataclass(eq=False)
class RequestError(Exception):
    """A rejected request.

    Attributes:
        status: status of the HTTP response.
        message: description of the problem and the remedy.
        parameter: name of the invalid field of the request.
        code: OpenAI's code of this error, if there is one.
        retry_after: seconds after which to retry; None if retrying is useless.
    """

    status: int
    message: str
    parameter: str | None = None
    _: KW_ONLY
    code: str | None = None
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, object]:
        """The JSON of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the HTTP response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def headline(error: Exception) -> str:
    """Summarize a model's error in one line: the error of each rank, without tracebacks."""
    lines = str(error).splitlines() or [type(error).__name__]
    ranks = [line for line in lines if line.startswith("rank ")]
    return "; ".join(ranks or lines[:1])
