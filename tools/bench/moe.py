"""Times a training step of a mixture of experts over ranks, beside the expert parallelism of transformers.

    python tools/bench/moe.py [--ranks 2] [--rounds 9]

Takes two minutes or so on two idle cores, and leaves nothing behind. Measured is forward, backward and the average of
gradients, of the same Qwen3-MoE with 8 experts, of

- ours: `parallelize(model, expert_parallel=True)` and `GradientReducer`, one thread for each rank; with the dispatcher
  that it chooses, and with each by name;
- the layers of torchtitan in place of the model's own mixtures, where it is installed (`pip install torchtitan==0.3.0
  triton`), with its all-to-all dispatcher and our average of the other gradients; its experts compute in bfloat16,
  whatever the weights are;
- transformers' `DistributedConfig(fsdp_size=N, ep_size=N, ep_implementation="all_to_all")`, on the same ranks: other
  layers are sharded by FSDP2, which also sends weights;
- the floor of ours, the sum of its parts, each timed by itself: the same step with nothing in place of experts, the
  forward and backward of the experts with the tokens that they get, in each layer of the rank that takes longest, as
  the others wait for it there, and the exchanges;
- one process with as many threads as there are ranks, and all ranks' tokens: nothing is sent.

Variants of the ranks take turns in each round; the one process runs before and after. Ratios are of medians. The losses
are checked to be equal, and the memory of the parameters is counted.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from nxd_layers.experts import dispatch
from nxd_layers.hf import parallelize
from nxd_optim import GradientReducer
from nxd_state import all_reduce, destroy_model_parallel, get_group, get_world_group, initialize_model_parallel
from nxd_testing import RankPool
from processes.surroundings import print_surroundings
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
SAMPLES, LENGTH = 4, 128  # of each rank
WARM_UP = 2
PARTS = ("its other layers", "its experts", "its exchanges")
EXCHANGES = ("all_to_all", "all_to_all_v", "all_gather", "reduce_scatter", "all_reduce")
TITAN = "torchtitan's layers"
TOLERANCE, TOLERANCE_OF_BFLOAT16 = 1e-4, 1e-2  # of losses in float32, and with experts in bfloat16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="of an expert-parallel group (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each variant (default: %(default)s)")
    options = parser.parse_args()
    print_surroundings(options.rounds)
    with tempfile.TemporaryDirectory() as folder, RankPool() as pool:
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(**SIZES, use_cache=False)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
        alone = pool.run(one_process, 1, folder, options.ranks, options.rounds, timeout=600)[0]
        times, losses, memory = pool.run(ranks_in_turns, options.ranks, folder, options.rounds, timeout=600)[0]
        again = pool.run(one_process, 1, folder, options.ranks, options.rounds, timeout=600)[0]
    alone_seconds = statistics.median(alone[0] + again[0])
    for name, loss in losses.items():
        tolerance = TOLERANCE_OF_BFLOAT16 if name == TITAN else TOLERANCE
        if abs(loss - alone[1]) > tolerance * abs(alone[1]):
            raise RuntimeError(f"the loss of {name} is {loss}, that of one process {alone[1]}")
    alone_name = f"one process x {options.ranks}"
    print(f"{alone_name:24} {alone_seconds * 1e3:8.1f} ms   {alone[2] / 2**20:6.1f} MiB of parameters")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        of_parameters = f"   {memory[name] / 2**20:6.1f} MiB of parameters" if name in memory else ""
        print(f"{name:24} {median * 1e3:8.1f} ms{of_parameters}   {median / alone_seconds:5.2f} x one process")
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for peer in ("transformers", TITAN):
        if peer in medians:
            print(f"{peer} by ours: {medians[peer] / medians['ours']:.2f}")
    floor = sum(medians[part] for part in PARTS)
    print(f"ours by its floor of {floor * 1e3:.1f} ms: {medians['ours'] / floor:.2f}")
    return 0


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SIZES["vocab_size"], (number * SAMPLES, LENGTH), generator=generator)


def one_process(folder: str, ranks: int, rounds: int) -> tuple[list[float], float, int]:
    """Seconds of steps, the loss, and bytes of parameters, with as many threads as ranks."""
    torch.set_num_threads(ranks)
    model = load(folder)
    ids = batch(ranks)
    step = plain_step(model, ids, lambda: None)
    losses = [step() for _ in range(WARM_UP)]
    seconds = [timed(step) for _ in range(rounds)]
    torch.set_num_threads(1)
    return seconds, losses[0], bytes_of(model)


def ranks_in_turns(folder: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float], dict[str, int]]:
    """The same of both variants, on this rank of several."""
    torch.set_num_threads(1)
    world = torch.distributed.get_world_size()
    sharded = load(
        folder,
        distributed_config=transformers.distributed.DistributedConfig(
            fsdp_size=world, ep_size=world, ep_implementation="all_to_all"
        ),
    )
    initialize_model_parallel(1, 1, world)
    ours = parallelize(load(folder), expert_parallel=True)
    ids = batch(world).chunk(world)[get_group("dp").rank]
    steps = {
        "ours": plain_step(ours, ids, GradientReducer(ours.parameters()).finish),
        "transformers": plain_step(sharded, ids, lambda: None),
    }
    if find_spec("torchtitan"):
        theirs = with_titans_layers(load(folder))
        others = (it for name, it in theirs.named_parameters() if ".inner_experts." not in name)
        steps[TITAN] = plain_step(theirs, ids, GradientReducer(others).finish)
    for dispatcher in ("all_to_all", "all_gather"):
        model = parallelize(load(folder), expert_parallel=True, expert_dispatcher=dispatcher)
        steps[f"ours, {dispatcher}"] = plain_step(model, ids, GradientReducer(model.parameters()).finish)
    mean = {}
    for name, step in steps.items():
        mean[name], *_ = [average(step()) for _ in range(WARM_UP)]
    steps |= parts_of(ours, load(folder), ids, steps["ours"])
    for part in PARTS:
        steps[part]()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            average(0.0)  # all begin together
            times[name].append(step() if name == "its experts" else timed(step))
    memory = {"ours": bytes_of(ours), "transformers": bytes_of(sharded)}
    destroy_model_parallel()
    return times, mean, memory


def with_titans_layers(model: Any) -> Any:
    """The model with torchtitan's layers, whose experts are shared out to all ranks; the weights are the same."""
    from torchtitan.distributed.utils import set_spmd_backend  # noqa: PLC0415 - optional
    from torchtitan.models.common.linear import Linear  # noqa: PLC0415 - optional
    from torchtitan.models.common.moe import (  # noqa: PLC0415 - optional
        GroupedExperts,
        MoE,
        RoutedExperts,
        TokenChoiceTopKRouter,
    )
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher  # noqa: PLC0415 - optional

    set_spmd_backend("default")  # of plain tensors
    number, top_k, hidden = SIZES["num_experts"], SIZES["num_experts_per_tok"], SIZES["hidden_size"]
    config = MoE.Config(
        num_experts=number,
        load_balance_coeff=None,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=hidden, hidden_dim=SIZES["moe_intermediate_size"], num_experts=number
            ),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=number, top_k=top_k),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=number,
            gate=Linear.Config(in_features=hidden, out_features=number, bias=False),
            top_k=top_k,
            score_func="softmax",
        ),
    )
    world = get_world_group()
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in model.model.layers:
        own, layer.mlp = layer.mlp, config.build()
        layer.mlp.router.gate.weight = own.gate.weight
        gate, up = own.experts.gate_up_proj.detach().chunk(2, dim=1)
        weights = {"w1_EFD": gate, "w3_EFD": up, "w2_EDF": own.experts.down_proj.detach()}
        for name, whole in weights.items():
            part = nn.Parameter(whole.chunk(world.size)[world.rank].clone())
            layer.mlp.routed_experts.inner_experts.register_parameter(name, part)
        layer.mlp.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return model


def parts_of(ours: nn.Module, whole: Any, ids: Tensor, step: Callable[[], float]) -> dict[str, Callable[[], float]]:
    """What a step of ours consists of, each part by itself."""
    exchanges: list[Callable[[], object]] = []
    inputs: list[tuple[Any, tuple[Tensor, ...]]] = []
    experts_class: Any = type(ours.get_submodule("model.layers.0.mlp.experts"))
    collectives = {name: getattr(dispatch, name) for name in EXCHANGES}
    compute = experts_class.forward

    def recorded(collective: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def send(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            exchanges.append(partial(collective, torch.zeros_like(tensor), *args, **kwargs))
            return collective(tensor, *args, **kwargs)

        return send

    def recorded_compute(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        given = (hidden_states, top_k_index, top_k_weights)
        inputs.append((experts, tuple(it.detach() for it in given)))
        output: Tensor = compute(experts, *given)
        return output

    experts_class.forward = recorded_compute
    for name, collective in collectives.items():
        setattr(dispatch, name, recorded(collective))
    try:
        step()
    finally:
        experts_class.forward = compute
        for name, collective in collectives.items():
            setattr(dispatch, name, collective)

    def exchange() -> float:
        for send in exchanges:
            send()
        return 0.0

    def experts_alone() -> float:
        """The seconds of all layers, of each by the rank that takes longest."""
        of_layers = []
        for experts, (tokens, index, weights) in inputs:
            begin = time.perf_counter()
            output = compute(experts, tokens.requires_grad_(), index, weights.requires_grad_())
            output.backward(torch.ones_like(output))
            of_layers.append(time.perf_counter() - begin)
            average(0.0)  # the next layer begins together
        ours.zero_grad()
        return float(all_reduce(torch.tensor(of_layers, dtype=torch.float64), get_world_group(), op="max").sum())

    dense = parallelize(whole, expert_parallel=True)
    for experts in dense.modules():
        if type(experts) is experts_class:
            experts.forward = without_experts
            experts.requires_grad_(False)
    reducer = GradientReducer(it for it in dense.parameters() if it.requires_grad)
    return dict(zip(PARTS, (plain_step(dense, ids, reducer.finish), experts_alone, exchange), strict=True))


def without_experts(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return hidden_states * top_k_weights.sum(dim=1, keepdim=True)


def load(folder: str, **options: Any) -> Any:
    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(Path(folder), dtype=torch.float32, **options)


def plain_step(model: nn.Module, ids: Tensor, finish: Callable[[], None]) -> Callable[[], float]:
    def step() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        finish()
        model.zero_grad()
        return float(loss.detach())

    return step


def timed(step: Callable[[], float]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def average(number: float) -> float:
    return float(all_reduce(torch.tensor([number], dtype=torch.float64), get_world_group(), op="avg"))


def bytes_of(model: nn.Module) -> int:
    return sum((it.to_local() if hasattr(it, "to_local") else it).nbytes for it in model.parameters())


if __name__ == "__main__":
    sys.exit(main())
