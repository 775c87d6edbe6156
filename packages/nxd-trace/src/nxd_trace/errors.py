"""Errors of traced models, other than wrong arguments."""


class WorkerError(RuntimeError):
    """A worker process raised, died, or waited for one that did; the message has its traceback."""


class ModelFolderError(ValueError):
    """A saved model cannot be loaded here: it is damaged, incomplete, or made for another platform."""


class MissingMainGuardError(WorkerError):
    """A script traces while a worker process imports it, because `if __name__ == "__main__":` is missing."""
