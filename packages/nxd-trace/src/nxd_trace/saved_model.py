"""Saves a traced model as a folder, and loads it."""

from pathlib import Path
from tempfile import TemporaryDirectory

from nxd_trace.buckets import BucketModelConfig
from nxd_trace.errors import ModelFolderError
from nxd_trace.manifest import MANIFEST, Manifest
from nxd_trace.model import TensorParallelModel, copy_model


def parallel_model_save(model: TensorParallelModel, save_dir: str | Path) -> None:
    """Save a traced model: a folder with a manifest, the compiled programs, and one subfolder per rank.

    The save is atomic: the folder is written beside `save_dir` and renamed. A traced model at `save_dir` is replaced.
    If `save_dir` is a link, the folder that it points to is written.

    Args:
        model: a traced or loaded model.
        save_dir: the folder to write.

    Raises:
        TypeError: `model` is not a traced model.
        ValueError: `save_dir` exists and is neither an empty folder nor a traced model without other files.
        ModelFolderError: the model's own files have been changed or removed.
    """
    if not isinstance(model, TensorParallelModel):
        raise TypeError(
            f"parallel_model_save got a {type(model).__name__}; expected a TensorParallelModel, which "
            "parallel_model_trace returns"
        )
    target = Path(save_dir).resolve()
    _check_replaceable(target)
    if target == model.folder.resolve():
        return
    manifest = Manifest.read(model.folder)
    manifest.check(model.folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
        new, old = Path(beside) / "new", Path(beside) / "old"
        new.mkdir()
        copy_model(model.folder, new)
        manifest.write(new)
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise


def _check_replaceable(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"save_dir={str(target)!r} is a file; pass a folder")
    found = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    if not found:
        return
    try:
        others = found - Manifest.read(target).files.keys() - {MANIFEST}
    except ModelFolderError:
        others = found
    if others:
        raise ValueError(
            f"save_dir={str(target)!r} holds other files ({sorted(others)[0]!r} and {len(others) - 1} more); pass a "
            "new folder, or that of a traced model"
        )


def parallel_model_load(
    load_dir: str | Path, *, bucket_config: BucketModelConfig | None = None, trust_code: bool = True
) -> TensorParallelModel:
    """Load a traced model and start its worker processes.

    Args:
        load_dir: the folder that `parallel_model_save` wrote; it must exist while the model is in use.
        bucket_config: the configuration that the model was traced with, if its functions are plain Python.
        trust_code: whether to run code from the folder: programs of the compilers "inductor" and "neuronx", and
            scripted bucket functions. Pass False for a folder from someone you do not trust; programs of the compiler
            "export" hold no code.

    Raises:
        ModelFolderError: the folder is incomplete or damaged, was made for another platform, device, torch or
            compiler, or holds untrusted code.
        WorkerError: a worker could not load its part.
    """
    folder = Path(load_dir)
    manifest = Manifest.read(folder)
    if not trust_code:
        manifest.check_is_data(folder)
    manifest.check(folder)
    return TensorParallelModel(folder, bucket_config=bucket_config)
