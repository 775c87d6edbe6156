"""The error with which a request is refused."""


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: of the HTTP response.
        message: what is wrong, and what to do.
        parameter: of the request, that is wrong.
    """

    def __init__(self, status: int, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter

    @property
    def body(self) -> dict[str, object]:
        """As clients of OpenAI's interface read errors."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": None}}
