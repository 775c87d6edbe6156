"""`ParallelDegrees`: the layout of a training job on its ranks, in one value.

Configs, recipes, plans, elastic runs and Lightning hold it or read one; the names of the documented API are here, too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from nxd_state.mesh import Mesh

SIZES = {  # the axes that a user sets, by their names in `neuronx_distributed_config`
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
}


def expert_tensor_parallel_mistake(etp: object, tp: int, *, prefix: str = "") -> str | None:
    """Return what is wrong with an expert tensor-parallel degree, or None if the layers support it.

    Each expert is sharded over all tensor-parallel ranks (`etp == tp`, the default), or is whole on its rank
    (`etp == 1`). In the second case tensor-parallel ranks may hold different experts (`has_whole_experts`).

    Args:
        etp: the degree; None for that of the other layers.
        tp: the tensor-parallel degree.
        prefix: the section of a recipe that holds both.
    """
    if etp is None or (type(etp) is int and etp in (1, tp)):
        return None
    return (
        f"{prefix}expert_tensor_parallel_size={etp!r} must be 1 or {prefix}tensor_parallel_size={tp}: an expert is "
        "sharded over all tensor-parallel ranks or over none"
    )


@dataclass(frozen=True, order=True)
class ParallelDegrees:
    """The degree of each axis of parallelism, and the states sharded along them.

    Args:
        tp: ranks that split each layer.
        pp: ranks that the layers are distributed over.
        cp: ranks that each sequence is cut over.
        ep: ranks that the experts of a layer are distributed over.
        etp: ranks that split each expert: 1, or `tp`; -1 for `tp`.
        dp: replicas of the model; 0 where the number of ranks is not known yet.
        sequence_parallel: activations between the layers' matrix products are split along the sequence.
        zero_stage: what is sharded over the replicas: 0 nothing, 1 the optimizer's states, 2 also the gradients, 3 also
            the parameters.
        shard_group_size: number of neighboring replicas over which that is sharded, and mirrored by the others; 0 for
            all.

    Raises:
        ValueError: a degree is not positive, or `etp` is neither 1 nor `tp`.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = -1
    dp: int = 0
    sequence_parallel: bool = False
    zero_stage: int = 0
    shard_group_size: int = 0

    def __post_init__(self) -> None:
        for axis in (*SIZES, "dp"):
            least = 1 if axis in SIZES else 0
            if type(getattr(self, axis)) is not int or getattr(self, axis) < least:
                raise ValueError(f"{axis}={getattr(self, axis)!r} is not a positive degree; use 1 to switch it off")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage={self.zero_stage!r} is not a stage; use 0, 1, 2 or 3")
        if self.etp == -1:
            object.__setattr__(self, "etp", self.tp)
        if mistake := expert_tensor_parallel_mistake(self.etp, self.tp):
            raise ValueError(mistake)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """The degrees of a complete config; the number of replicas stays open."""
        sizes: dict[str, Any] = {axis: config[name] for axis, name in SIZES.items()}
        etp = config["expert_tensor_parallel_size"] or sizes["tp"]
        return cls(**sizes, etp=etp, sequence_parallel=bool(config["sequence_parallel"]))

    @classmethod
    def of_mesh(
        cls, mesh: Mesh, *, sequence_parallel: bool = False, zero_stage: int = 0, shard_group_size: int = 0
    ) -> Self:
        """The degrees of a mesh, whose number of replicas is known."""
        sharding = {"zero_stage": zero_stage, "shard_group_size": shard_group_size}
        return cls(mesh.tp, mesh.pp, mesh.cp, mesh.ep, mesh.etp, mesh.dp, sequence_parallel, **sharding)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The degrees of a text such as "tp=2,pp=2"; omitted degrees are 1.

        Raises:
            ValueError: the text is not of that form.
        """
        degrees: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            name = name.strip()
            if name not in SIZES or name in degrees or not value.strip().isdecimal() or int(value) < 1:
                raise ValueError(
                    f"{part!r} in the layout {text!r} is not a degree; write it like tp=2,pp=2, "
                    f"with degrees among {', '.join(SIZES)}"
                )
            degrees[name] = int(value)
        return cls(**degrees)

    def as_config(self) -> dict[str, Any]:
        """These degrees as arguments of `neuronx_distributed_config`."""
        sizes: dict[str, Any] = {name: getattr(self, axis) for axis, name in SIZES.items()}
        whole_experts = {"expert_tensor_parallel_size": self.etp} if self.etp != self.tp else {}
        return {**sizes, **whole_experts, "sequence_parallel": self.sequence_parallel}

    @property
    def model_ranks(self) -> int:
        """Ranks of one replica of the model."""
        return self.tp * self.pp * self.cp

    @property
    def world_size(self) -> int:
        """Ranks of the job; 0 where `dp` is not known."""
        return self.model_ranks * self.dp

    @property
    def least_ranks(self) -> int:
        """The smallest number of ranks that these degrees fit; every number that fits is a multiple of it."""
        return self.pp * math.lcm(self.tp * self.cp, self.ep * self.etp)

    @property
    def splits_experts(self) -> bool:
        """Whether expert layers are laid out differently from dense ones."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def splits_layers(self) -> bool:
        """Whether some layer is split over ranks."""
        return self.tp > 1 or self.splits_experts

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, over which states are sharded: data- and context-parallel ranks."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.replicas * self.tp // (self.ep * self.etp)

    def on(self, world_size: int) -> Self:
        """These degrees on `world_size` ranks: `dp` takes the remaining ranks.

        Raises:
            ValueError: the degrees do not divide the ranks.
        """
        return replace(self, dp=self.mesh(world_size).dp)

    def mesh(self, world_size: int | None = None) -> Mesh:
        """The mesh of `world_size` ranks, or of `dp` replicas if None.

        Raises:
            ValueError: the degrees do not divide the ranks.
        """
        ranks = self.world_size if world_size is None else world_size
        return Mesh(ranks, pp=self.pp, cp=self.cp, tp=self.tp, ep=self.ep, etp=self.etp)

    def describe(self) -> str:
        """Such as "TP 2 x DP 2", or "TP 2 + SP x CP 2 x PP 2 x DP 2, EP 2, ZeRO-1" with all there is."""
        sequence_parallel = " + SP" if self.sequence_parallel else ""
        axes = [f"TP {self.tp}{sequence_parallel}"]
        axes += [f"{axis.upper()} {degree}" for axis in ("cp", "pp") if (degree := getattr(self, axis)) > 1]
        axes += [f"DP {self.dp}"] if self.dp else []
        whole = " of whole experts" if self.etp < self.tp else ""
        experts = f", EP {self.ep}{whole}" if self.splits_experts else ""
        group = f" over {self.shard_group_size}" if self.shard_group_size else ""
        return f"{' x '.join(axes)}{experts}{f', ZeRO-{self.zero_stage}{group}' if self.zero_stage else ''}"

    def __str__(self) -> str:
        degrees = {axis: getattr(self, axis) for axis in SIZES}
        return ",".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1 or axis == "tp")
