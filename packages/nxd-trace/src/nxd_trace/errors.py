"""Errors of traced models, other than wrong arguments."""


class WorkerError(RuntimeError):
    """A worker process raised, died, or waited for one that did; the message has its traceback."""


class ModelFolderError(ValueError):
    """A saved model cannot be loaded here: it is damaged, incomplete, or made for another platform."""


class MissingMainGuardError(WorkerError):
    """A script traces while a worker process imports it, because `if __name__ == "__main__":` is missing."""


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: status of the HTTP response.
        message: description of the problem and the remedy.
        parameter: name of the wrong field of the request.
        code: OpenAI's name for this kind of error, if it has one.
        retry_after: seconds after which the same request may be answered; None if it never is.
    """

    def __init__(
        self,
        status: int,
        message: str,
        parameter: str | None = None,
        *,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, object]:
        """As clients of OpenAI's interface read errors."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Of the HTTP response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def headline(error: Exception) -> str:
    """An error of the model in one line: of each rank what it failed with, without tracebacks."""
    lines = str(error).splitlines() or [type(error).__name__]
    ranks = [line for line in lines if line.startswith("rank ")]
    return "; ".join(ranks or lines[:1])
