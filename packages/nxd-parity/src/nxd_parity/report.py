"""The result of a comparison, as data and as text."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs from one process.

    Attributes:
        step: the step, from 1.
        kind: "initial parameter", "activation", "loss", "gradient", "gradient norm" or "parameter".
        name: name of the module or parameter.
        rank: the global rank that has the values.
        problem: the problem, if it is not that values differ.
        max_abs: largest absolute difference.
        max_rel: largest difference, relative to the tensor's largest value in one process.
        index: index of the largest difference in the whole tensor.
        expected: the value there in one process.
        found: the value there in the layout.
    """

    step: int
    kind: str
    name: str
    rank: int = 0
    problem: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    index: tuple[int, ...] = ()
    expected: float = 0.0
    found: float = 0.0

    def __str__(self) -> str:
        title = f"step {self.step}: {self.kind} {self.name}".rstrip()
        if self.problem:
            return f"{title} {self.problem}"
        place = f" at {list(self.index)}" if self.index else ""
        return (
            f"{title} differs on rank {self.rank}: largest difference {self.max_abs:.3g} (relative {self.max_rel:.3g})"
            f"{place}, where one process has {self.expected:.10g} and the layout {self.found:.10g}"
        )


@dataclass
class ParityReport:
    """The outcome, the same on every rank.

    Attributes:
        layout: the layout, such as "TP 2 x PP 1 x DP 2".
        dtype: dtype of weights and inputs, such as "float64".
        rtol: tolerance, relative to the largest value of a tensor.
        steps: number of steps that were compared.
        compared: number of tensors of each kind that agree.
        not_compared: modules whose outputs cannot be compared with one process, and why.
        difference: the first tensor that differs; None if all agree.
    """

    layout: str
    dtype: str
    rtol: float
    steps: int = 0
    compared: dict[str, int] = field(default_factory=dict)
    not_compared: dict[str, str] = field(default_factory=dict)
    difference: Difference | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in self.compared.items())
        agree = f"{counts.replace('losss', 'losses')} agree"
        lines = [f"{self.layout} against one process, {self.dtype}, {self.steps} steps, tolerance {self.rtol:g}"]
        if self.difference is None:
            lines.append(agree)
        else:
            lines += [f"DIFFERENT  {self.difference}", f"before that, {agree if counts else 'nothing was compared'}"]
        if self.not_compared:
            name, reason = next(iter(self.not_compared.items()))
            lines.append(f"outputs of {len(self.not_compared)} modules were not compared, such as {name}: {reason}")
        return "\n".join(lines)
