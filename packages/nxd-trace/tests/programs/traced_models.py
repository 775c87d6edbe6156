"""Models for the tests, in a module that worker processes can import."""

import os
import resource
import signal

import torch
from nxd_state import active_group, all_gather, all_reduce, set_shard_spec, shard_along
from torch import nn

IN, HIDDEN, OUT = 6, 8, 4


def logical_weights(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Return the whole weights of an `MLP`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"up.weight": (HIDDEN, IN), "up.bias": (HIDDEN,), "down.weight": (OUT, HIDDEN)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def plain_mlp(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Compute the `MLP` in one process, without parallelism."""
    return torch.relu(x @ weights["up.weight"].T + weights["up.bias"]) @ weights["down.weight"].T


class Split(nn.Linear):
    """This rank's shard of a linear layer, along dim 0 (outputs) or 1 (inputs)."""

    def __init__(self, inputs: int, outputs: int, *, dim: int, bias: bool, dtype: torch.dtype, device: str) -> None:
        group = active_group("tp")
        if (outputs, inputs)[dim] % group.size:
            raise ValueError(f"{group.size} ranks do not divide {(outputs, inputs)[dim]}")
        local = [outputs, inputs]
        local[dim] //= group.size
        super().__init__(local[1], local[0], bias=bias, dtype=dtype, device=device)
        for name, parameter in self.named_parameters():
            shape = (outputs, inputs) if name == "weight" else (outputs,)
            set_shard_spec(parameter, shard_along(shape, dim, rank=group.rank, size=group.size))


class MLP(nn.Module):
    """An MLP with its hidden units split over the ranks."""

    def __init__(self, dtype: torch.dtype = torch.float64, device: str = "meta") -> None:
        super().__init__()
        self.up = Split(IN, HIDDEN, dim=0, bias=True, dtype=dtype, device=device)
        self.down = Split(HIDDEN, OUT, dim=1, bias=False, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(self.down(torch.relu(self.up(x))), active_group("tp"))


class Gathered(MLP):
    """Also returns the hidden units, in a dict, and twice as a tuple."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, object]:
        hidden = all_gather(torch.relu(self.up(x)), active_group("tp"), dim=-1)
        return {"output": super().forward(x) * scale, "hidden": (hidden, [hidden + 1, None])}


class Scaled(MLP):
    """Has a non-persistent value that no source of weights has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.full((), 3.0, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(x)


class Cache(nn.Module):
    """Writes rows into a state, and returns the sum of all rows; the state's width is split over the ranks."""

    def __init__(self, rows: int = 4, first: float = 0.0) -> None:
        super().__init__()
        group = active_group("tp")
        self.register_buffer("rows", torch.full((rows, 8 // group.size), first, dtype=torch.float64))

    def forward(self, new: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        group = active_group("tp")
        own = new.chunk(group.size, dim=-1)[0] + group.size  # the same graph on every rank
        self.rows.index_copy_(0, positions, own)
        return all_gather(self.rows.sum(0), group)


class CacheByOutput(Cache):
    """Like `Cache`, with the new state as an output."""

    def forward(self, new: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = active_group("tp")
        rows = self.rows.index_copy(0, positions, new.chunk(group.size, dim=-1)[0] + group.size)
        return all_gather(rows.sum(0), group), rows


class UnevenCache(nn.Module):
    """Writes rows into a state and returns its sum; the state's 8 columns are split 5 and 3 over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.width = (5, 3)[active_group("tp").rank]
        self.register_buffer("rows", torch.zeros(4, self.width, dtype=torch.float64))

    def forward(self, new: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.rows.index_copy_(0, positions, new[:, : self.width])
        return all_reduce(self.rows.sum(), active_group("tp"))


class Sum(nn.Module):
    """Returns the sum per row without padding, and the number of elements."""

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ids.sum(-1), torch.full((1,), ids.shape[-1])


class Texts(nn.Module):
    """Returns texts as bytes, one tensor each."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        for index, text in enumerate(texts):
            self.register_buffer(f"text_{index}", torch.tensor(list(text.encode()), dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [text + 0 for text in self.buffers()]


def mlp() -> nn.Module:
    return MLP()


def mlp_that_fills_the_disk() -> nn.Module:
    """From now on, no file of this worker may be longer than a few bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    return MLP()


def scaled() -> nn.Module:
    return Scaled()


def gathered() -> nn.Module:
    return Gathered()


def bfloat16_mlp() -> nn.Module:
    return MLP(torch.bfloat16)


def cache(first: float = 0.0) -> tuple[nn.Module, list[str]]:
    return Cache(first=first), ["rows"]


def uneven_cache() -> tuple[nn.Module, list[str]]:
    return UnevenCache(), ["rows"]


def cache_from_seven() -> tuple[nn.Module, list[str]]:
    return cache(first=7.0)


def cache_by_output() -> tuple[nn.Module, dict[torch.Tensor, int]]:
    model = CacheByOutput()
    return model, {model.rows: 1}


def cache_of_length(length: int) -> tuple[nn.Module, list[str]]:
    return Cache(rows=length), ["rows"]


def unnamed_state() -> nn.Module:
    return Cache()


def total() -> nn.Module:
    return Sum()


def raises_on_rank_1() -> nn.Module:
    if active_group("tp").rank == 1:
        raise ValueError("no weights for the second rank")
    return MLP(device="cpu")


def dies_on_rank_1() -> nn.Module:
    if active_group("tp").rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return MLP(device="cpu")


def surroundings() -> nn.Module:
    return Texts([os.environ["GREETING"], os.getcwd(), str(torch.get_num_threads())])


def no_model() -> str:
    return "a model"


def fitting_kernel():
    return torch.jit.script(_pad_ids)


def python_kernel():
    return _pad_ids


def _pad_ids(inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    ids = inputs[0]
    bucket = 0
    length = 4
    if ids.shape[1] > 4:
        bucket = 1
        length = 8
    padded = torch.nn.functional.pad(ids, [0, length - ids.shape[1]], value=0.0)
    return [padded], torch.tensor(bucket)


def first_rows():
    return torch.jit.script(_first_rows)


def _first_rows(shapes: list[list[int]], states: list[torch.Tensor], bucket: torch.Tensor) -> list[torch.Tensor]:
    return [states[index][: shapes[index][0]] for index in range(len(states))]
