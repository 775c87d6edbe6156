"""Errors of traced models other than wrong arguments."""


class WorkerError(RuntimeError):
    """A worker process raised, died, or was left waiting by one that did; the text holds its traceback."""


class ModelFolderError(ValueError):
    """A saved model that cannot be loaded here: damaged, incomplete, or made for something else."""


class MissingMainGuardError(WorkerError):
    """A script traces while a worker process imports it, because `if __name__ == "__main__":` is missing."""
