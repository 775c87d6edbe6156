"""Dropout of what tensor-parallel ranks have parts of, such as attention weights of their heads.

Torch's generator is the same on these ranks, so that they drop the same of what each of them has whole; of what is
split, each rank would repeat the masks of the others. So between a layer that splits its outputs and the one that sums
them again, each rank draws numbers of its own (Korthikanti et al. 2022, "Reducing Activation Recomputation").
"""

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

from nxd_state import rng_of_own_rank
from torch import nn


class SplitDropout:
    """The hooks of one model.

    Args:
        model: parallelized.
        columns: paths of its modules whose outputs are split.
        rows: paths of those that sum split inputs.
    """

    def __init__(self, model: nn.Module, columns: Iterable[str], rows: Iterable[str]) -> None:
        self._stack = ExitStack()
        for path in columns:
            parent = model.get_submodule(path.rpartition(".")[0])
            column = model.get_submodule(path)
            column.register_forward_pre_hook(self._leave)  # an adapter in it has a whole input
            column.register_forward_hook(partial(self._enter, parent))
            parent.register_forward_hook(self._leave, always_call=True)
        for path in rows:
            model.get_submodule(path).register_forward_pre_hook(self._leave)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is outside."""
        return _outside, ()

    def _enter(self, parent: nn.Module, *_: Any) -> None:
        if parent.training and _drops(parent):
            self._stack.close()
            self._stack.enter_context(rng_of_own_rank())

    def _leave(self, *_: Any) -> None:
        self._stack.close()


def _outside() -> SplitDropout:
    made = SplitDropout.__new__(SplitDropout)
    made._stack = ExitStack()
    return made


def _drops(module: nn.Module) -> bool:
    """Whether a module has dropout: a probability of its own, or a layer."""
    own = any("drop" in name and isinstance(it, float) and it > 0 for name, it in vars(module).items())
    return own or any(isinstance(it, nn.Dropout) and it.p > 0 for it in module.children())
