"""ZeRO, Muon, gradient averaging, exact clipping and mixed precision for training on many ranks."""

from nxd_optim.adafactor import Adafactor
from nxd_optim.clip import clip_grad_norm, grad_norm
from nxd_optim.elementwise import check_elementwise, check_parameterwise
from nxd_optim.gradient_histogram import (
    LARGEST_EXPONENT,
    SMALLEST_EXPONENT,
    GradientHistogram,
    GradientHistograms,
    gradient_histograms,
)
from nxd_optim.groups_and_states import give_states, parameter_groups, restore_numbers, state_tensor
from nxd_optim.mixed_precision import LossScaler, LossScaleTooSmallError, MixedPrecision, resolve_mixed_precision
from nxd_optim.muon import Muon
from nxd_optim.muon_groups import muon_parameter_groups
from nxd_optim.placement import expert_shard_group_size
from nxd_optim.reducer import GradientReducer
from nxd_optim.sequence_parallel import reduce_sequence_parallel_gradients
from nxd_optim.stochastic_rounding import StochasticRounding, stochastic_round
from nxd_optim.weight_average import WeightAverage
from nxd_optim.zero import (
    MASTER_KEY,
    FullySharded,
    MemoryBytes,
    MemoryReport,
    NeuronZero1Optimizer,
    StateShard,
    StateTensor,
    ZeroRedundancyOptimizer,
    fully_shard,
    parameters_by_unit,
)

__version__ = "0.1.0"

__all__ = [
    "NeuronZero1Optimizer",
    "ZeroRedundancyOptimizer",
    "fully_shard",
    "FullySharded",
    "parameters_by_unit",
    "expert_shard_group_size",
    "StateTensor",
    "StateShard",
    "MASTER_KEY",
    "MemoryReport",
    "MemoryBytes",
    "check_elementwise",
    "check_parameterwise",
    "Muon",
    "Adafactor",
    "muon_parameter_groups",
    "GradientReducer",
    "reduce_sequence_parallel_gradients",
    "grad_norm",
    "clip_grad_norm",
    "parameter_groups",
    "give_states",
    "restore_numbers",
    "state_tensor",
    "MixedPrecision",
    "resolve_mixed_precision",
    "LossScaler",
    "LossScaleTooSmallError",
    "StochasticRounding",
    "stochastic_round",
    "WeightAverage",
    "GradientHistogram",
    "GradientHistograms",
    "gradient_histograms",
    "SMALLEST_EXPONENT",
    "LARGEST_EXPONENT",
]
