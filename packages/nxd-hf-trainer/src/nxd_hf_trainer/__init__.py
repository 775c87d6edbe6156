"""Scripts of transformers' Trainer, TRL and Accelerate, unedited, at the layouts of the nxd packages.

`nxd run --tensor-parallel-size 2 train.py` runs a script so; `under_trainer` does the same from Python. The script sees
as many processes as there are replicas of the model. Its model is split, and its optimizer replaced, where it passes
them to `Accelerator.prepare`, as Trainer does.
"""

from nxd_hf_trainer.session import install, under_trainer

__all__ = ["under_trainer", "install"]
