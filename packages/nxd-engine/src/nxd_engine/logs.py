"""Log lines of many ranks: one line per event, from rank 0 by default, at the level of `NXD_LOG_LEVEL`."""

import logging
import os
import sys

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
    "off": logging.CRITICAL + 1,
}
LEVEL_VARIABLE = "NXD_LOG_LEVEL"


def log_level() -> int:
    """Return the level that `NXD_LOG_LEVEL` names; "info" if it is unset."""
    name = os.environ.get(LEVEL_VARIABLE, "info")
    if name.lower() not in LEVELS:
        raise ValueError(f"unknown level {LEVEL_VARIABLE}={name!r}; use one of {', '.join(LEVELS)}")
    return LEVELS[name.lower()]


def get_logger(name: str = "neuronx_distributed", rank0_only: bool = True) -> logging.Logger:
    """Return a logger that writes to standard error, each line with time, level and rank.

    Args:
        name: the logger's name; the same name (and `rank0_only`) returns the same logger.
        rank0_only: drop lines of other ranks.

    Raises:
        ValueError: `NXD_LOG_LEVEL` is not a level.
    """
    logger = logging.getLogger(name if rank0_only else f"{name}.all_ranks")
    if not any(isinstance(handler, _LineHandler) for handler in logger.handlers):
        handler = _LineHandler()
        handler.setFormatter(_OneLine())
        if rank0_only:
            handler.addFilter(lambda record: _rank() == 0)
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(log_level())
    return logger


class PackagePathFilter(logging.Filter):
    """Adds `relativepath` to records: their file's path relative to the longest entry of `sys.path` above it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record pass."""
        folders = sorted((os.path.join(os.path.abspath(entry), "") for entry in sys.path), key=len, reverse=True)
        found = next((folder for folder in folders if record.pathname.startswith(folder)), None)
        record.relativepath = None if found is None else os.path.relpath(record.pathname, found)
        return True


class _LineHandler(logging.Handler):
    """Writes to the current standard error, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if "tqdm" in sys.modules:
            sys.modules["tqdm"].tqdm.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)


class _OneLine(logging.Formatter):
    """`2026-01-31 12:00:00 I rank 0: message` on one line, even if the message or its traceback has several."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        line = " | ".join(part.strip() for part in text.splitlines() if part.strip())
        return f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')} {record.levelname[0]} rank {_rank()}: {line}"


def _rank() -> int:
    """Return this process's global rank, even before torch.distributed is started; does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        from nxd_state import rank_of_job  # noqa: PLC0415  (it loads torch, which is loaded here)

        return rank_of_job()
    return int(os.environ.get("RANK", "0"))
