"""`fully_shard`: values, memory and messages of parameters that are gathered when they are used (ZeRO-3)."""

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from nxd_optim import NeuronZero1Optimizer, fully_shard
from nxd_optim.zero.flat_parameters import FlatParameters
from nxd_state import (
    active_group,
    count_traffic,
    destroy_model_parallel,
    initialize_model_parallel,
    local_values,
    owned_range,
    set_shard_spec,
    shard_along,
    whole_parameters,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS, STEPS, SAMPLES = 7, 4, 4, 8  # an odd width, so that parts end within rows


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, hidden):
        return hidden + self.down(self.up(hidden).tanh())


class Model(nn.Module):
    """Blocks, with parameters before and after them."""

    def __init__(self, make_block=Block, *, recomputes=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self._recomputes = recomputes

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self._recomputes else block(hidden)
        return (hidden * self.scale).square().mean()


def make(model_class=Model, **arguments):
    torch.manual_seed(0)
    return model_class(**arguments).double()


def inputs_of(step, microbatch=0):
    generator = torch.Generator().manual_seed(10 * step + microbatch)
    return torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def optimizer_of(model, **arguments):
    trained = [it for it in model.parameters() if it.requires_grad]
    return NeuronZero1Optimizer(trained, torch.optim.AdamW, lr=0.05, **{"max_norm": 0.1, **arguments})


def train_one_process(model, *, microbatches=1):
    optimizer = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=0.05)
    for step in range(STEPS):
        for microbatch in range(microbatches):
            (model(inputs_of(step, microbatch)) / microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: it.detach().clone() for name, it in model.named_parameters()}


def mine(inputs):
    replicas = active_group("dp", "cp")
    return inputs.chunk(replicas.size)[replicas.rank]


def take_steps(model, optimizer, *, microbatches=1, every=True):
    """Steps of this replica; gradients are averaged at each backward, or once at the step."""
    for step in range(STEPS):
        for microbatch in range(microbatches):
            loss = model(mine(inputs_of(step, microbatch))) / microbatches
            if every:
                with optimizer.each_backward(list(model.parameters())):
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train(model, optimizer, **arguments):
    """The weights after `take_steps`."""
    take_steps(model, optimizer, **arguments)
    with whole_parameters(model.parameters()):
        return {name: it.detach().clone() for name, it in model.named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-13, msg=lambda text, name=name: name + text)


CASES = {
    "as it is": {},
    "several microbatches": {"microbatches": 3},
    "gradients accumulated whole": {"microbatches": 3, "every": False},
    "kept until the step": {"microbatches": 3, "reshard_after_forward": False},
    "recomputed": {"recomputes": True, "microbatches": 2},
    "groups of two": {"shard_group_size": 2, "microbatches": 2},
    "shared between neighbors": {"reshard_after_forward": 2},
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_equals_one_process(run_ranks, ranks):
    def train_case(case):
        arguments = dict(CASES[case])
        steps = {name: arguments.pop(name) for name in ("microbatches", "every") if name in arguments}
        model = make(recomputes=arguments.pop("recomputes", False))
        fully_shard([model], model.blocks, **arguments)
        group = arguments.get("shard_group_size")
        return train(model, optimizer_of(model, shard_gradients=True, shard_group_size=group), **steps)

    def train_all():
        initialize_model_parallel()
        return {case: train_case(case) for case in CASES}

    results = run_ranks(train_all, ranks)

    for case, arguments in CASES.items():
        expected = train_one_process(make(), microbatches=arguments.get("microbatches", 1))
        for of_rank in results:
            assert_equal(of_rank[case], expected)


class Tied(Model):
    """Two blocks share a weight, and a module is called twice."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks.append(self.blocks[1])


class Frozen(Model):
    """One block trains nothing, and of another only a bias is trained."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[3].requires_grad_(False)
        self.blocks[3].down.bias.requires_grad_(True)


class AllButLastFrozen(Model):
    """No gradient reaches the first blocks."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.blocks[3].down.requires_grad_(True)


@dataclass
class Output:
    hidden: torch.Tensor


class Wrapped(Block):
    """Its output is an object that torch's trees do not know."""

    def forward(self, hidden):
        return Output(super().forward(hidden))


class OfObjects(Model):
    def __init__(self):
        super().__init__(Wrapped)

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden).hidden
        return (hidden * self.scale).square().mean()


@pytest.mark.parametrize("model_class", [Tied, Frozen, AllButLastFrozen, OfObjects])
def test_models_that_broke_other_implementations(run_ranks, model_class):
    def train_it():
        initialize_model_parallel()
        model = make(model_class)
        fully_shard([model], dict.fromkeys(model.blocks))
        return train(model, optimizer_of(model, shard_gradients=True), microbatches=2)

    expected = train_one_process(make(model_class), microbatches=2)
    for of_rank in run_ranks(train_it, 2):
        assert_equal(of_rank, expected)


class Scalars(Model):
    """A parameter of one element."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return super().forward(inputs) * self.factor.sum()


def test_tensor_parallel_ranks_share_whole_parameters(run_ranks):
    def train_it():
        initialize_model_parallel(2)
        model = make(Scalars)
        size = active_group("tp").size
        set_shard_spec(model.scale, shard_along((size * WIDTH,), 0, rank=active_group("tp").rank, size=size))
        fully_shard([model], model.blocks)
        optimizer = optimizer_of(model, shard_gradients=True, grad_clipping=False)
        return train(model, optimizer)

    found = run_ranks(train_it, 4)
    for of_rank in found:
        assert_equal(of_rank, found[0])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_that_is_dropped_halfway_does_not_count(run_ranks, sharded):
    def train_it():
        initialize_model_parallel()
        model = make()
        if sharded:
            fully_shard([model], model.blocks)
        optimizer = optimizer_of(model, shard_gradients=True)
        with optimizer.each_backward(list(model.parameters())):
            (1000 * model(mine(inputs_of(7)))).backward()
        optimizer.zero_grad()  # instead of the second microbatch
        return train(model, optimizer, microbatches=2)

    for of_rank in run_ranks(train_it, 2):
        assert_equal(of_rank, train_one_process(make(), microbatches=2))


def test_a_step_after_a_failed_one_is_as_if_it_had_not_been(run_ranks):
    def fail(*_):
        raise FloatingPointError

    def train_it():
        initialize_model_parallel()
        model = make()
        fully_shard([model], model.blocks)
        optimizer = optimizer_of(model)
        for place in (model.blocks[2].up.register_forward_hook, model.blocks[1].down.register_full_backward_hook):
            hook = place(fail)
            with pytest.raises(FloatingPointError):
                model(mine(inputs_of(0))).backward()
            hook.remove()
            optimizer.zero_grad()
        model(mine(inputs_of(0))).backward()
        assert all(it.isnan().all() for it in model.parameters())
        optimizer.zero_grad()
        return train(model, optimizer)

    for of_rank in run_ranks(train_it, 2):
        assert_equal(of_rank, train_one_process(make()))


def test_unit_inside_a_unit_has_its_own_parameters(run_ranks):
    def train_it():
        initialize_model_parallel()
        model = make()
        fully_shard([model], [*model.blocks, model.blocks[1].up])
        assert len({id(it.values.untyped_storage()) for it in map(owned_range, model.blocks[1].parameters())}) > 1
        return train(model, optimizer_of(model))

    for of_rank in run_ranks(train_it, 2):
        assert_equal(of_rank, train_one_process(make()))


def test_parameters_frozen_or_left_out_after_sharding_stay_as_they_are(run_ranks):
    def prepare(model):
        model.blocks[0].up.requires_grad_(False)
        model.first.weight.requires_grad_(False)

    def train_it():
        initialize_model_parallel()
        model = make()
        fully_shard([model], model.blocks)
        prepare(model)
        return train(model, optimizer_of(model))

    expected = make()
    prepare(expected)
    expected = train_one_process(expected)
    for of_rank in run_ranks(train_it, 2):
        assert_equal(of_rank, expected)


def test_parameters_unfrozen_later_are_added(run_ranks):
    def train_it(sharded):
        model = make()
        model.blocks[0].requires_grad_(False)
        if sharded:
            fully_shard([model], model.blocks)
        optimizer = optimizer_of(model)
        train(model, optimizer)
        model.blocks[0].up.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.blocks[0].up.parameters())})
        return train(model, optimizer)

    def both():
        initialize_model_parallel()
        return [train_it(sharded) for sharded in (False, True)]

    for expected, found in run_ranks(both, 2):
        assert_equal(found, expected)


def test_a_rank_keeps_its_part_and_two_units_while_it_computes(run_ranks):
    def train_it(patch):
        initialize_model_parallel()
        model = make()
        whole, most = {}, [0]
        gather, release = FlatParameters.gather, FlatParameters.release

        def noted(function):
            def call(flat, **arguments):
                function(flat, **arguments)
                whole[id(flat)] = flat.nbytes if flat.is_whole else 0
                most[0] = max(most[0], sum(whole.values()))

            return call

        fully_shard([model], model.blocks)
        patch.setattr(FlatParameters, "gather", noted(gather))
        patch.setattr(FlatParameters, "release", noted(release))
        optimizer = optimizer_of(model, shard_gradients=True)
        with count_traffic() as traffic:
            take_steps(model, optimizer, microbatches=2)
        kept = sum(local_values(it).nbytes for it in model.parameters())
        report = optimizer.memory_report().measured
        return kept, most[0], traffic["dp+cp"].sent_bytes, report.parameters, report.state

    def with_patch():
        with pytest.MonkeyPatch.context() as patch:
            return train_it(patch)

    block, others = (sum(it.numel() for it in module.parameters()) * 8 for module in (make().blocks[0], make().first))
    others += WIDTH * 8
    for ranks in (2, 4):
        results = run_ranks(with_patch, ranks)
        assert sum(kept for kept, *_ in results) == LAYERS * block + others
        used = LAYERS * (block - 5 * 8) + others
        assert sum(state for *_, state in results) == pytest.approx(2 * used, rel=0.02)  # and numbers of steps
        for _, most, sent, parameters, state in results:
            assert most == pytest.approx(2 * block + others, rel=0.05)  # this unit and the next one
            assert parameters == pytest.approx((LAYERS * block + others) / ranks, rel=0.05)
            assert state <= 2 * (LAYERS * block + others) / ranks * 1.05
            # In each microbatch parameters twice, those of the last block and the others once, and gradients once.
            gathers = 2 * (2 * LAYERS * block - block + others)
            gradients = 2 * (LAYERS * block + others)
            least = STEPS * (gathers + gradients) * (ranks - 1) / ranks
            assert sent == pytest.approx(least, rel=0.05)  # padding, norms and the flags of used parameters


def test_the_next_unit_is_on_its_way_while_a_unit_computes(run_ranks):
    def train_it():
        initialize_model_parallel()
        model = make()
        events = []
        gather = FlatParameters.gather
        fully_shard([model], model.blocks)
        index = {id(block.up.weight): number for number, block in enumerate(model.blocks)}

        def number_of(flat):
            return next((index[id(it)] for it in flat.parameters if id(it) in index), None)

        def gathering(flat):
            if not flat.is_whole and number_of(flat) is not None:
                events.append(("gather", number_of(flat)))
            gather(flat)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FlatParameters, "gather", gathering)
            for number, block in enumerate(model.blocks):
                block.down.register_forward_hook(lambda *_, number=number: events.append(("forward", number)))
                block.down.register_full_backward_hook(lambda *_, number=number: events.append(("backward", number)))
            model(mine(inputs_of(0))).backward()
        return events

    for events in run_ranks(train_it, 2):
        forward = [("gather", 0)]
        for number in range(LAYERS - 1):
            forward += [("gather", number + 1), ("forward", number)]
        forward += [("forward", LAYERS - 1)]
        backward = []
        for number in reversed(range(1, LAYERS)):
            backward += [("gather", number - 1), ("backward", number)]
        assert events == [*forward, *backward, ("backward", 0)]


def test_inputs_are_freed_with_the_graph():
    initialize_model_parallel()
    model = make()
    fully_shard([model], list(model.blocks))
    gc.disable()
    try:
        inputs = inputs_of(0).requires_grad_()
        freed = weakref.ref(inputs)
        model.first = nn.Identity()  # the first unit takes the input itself, as on a pipeline's later stages
        model(inputs.view_as(inputs)).backward()
        del inputs
        assert freed() is None
    finally:
        gc.enable()
        destroy_model_parallel()


def test_values_read_as_nan_and_state_is_refused_outside_a_block(run_ranks):
    def read():
        initialize_model_parallel()
        model = make()
        expected = {name: it.clone() for name, it in model.state_dict().items()}
        fully_shard([model], model.blocks)
        assert model.blocks[0].up.weight.shape == (3 * WIDTH, WIDTH)
        assert model.blocks[0].up.weight.isnan().all()
        messages = []
        for call in (model.state_dict, lambda: model.load_state_dict(expected)):
            with pytest.raises(RuntimeError, match="sharded over the replicas") as raised:
                call()
            messages.append(str(raised.value))
        with whole_parameters(model.parameters()):
            assert all(torch.equal(it, expected[name]) for name, it in model.state_dict().items())
        with whole_parameters(model.parameters(), changed=True):
            model.load_state_dict({name: it + 1 for name, it in expected.items()})
        with whole_parameters(model.parameters()):
            assert all(torch.equal(it, expected[name] + 1) for name, it in model.state_dict().items())
        return messages

    for first, second in run_ranks(read, 2):
        assert first.startswith("state_dict() of a model")
        assert second.startswith("load_state_dict() of a model")


def test_evaluation_gives_everything_up_and_equals_the_whole_model(run_ranks):
    def evaluate():
        initialize_model_parallel()
        model = make()
        expected = model(inputs_of(0)).item()
        fully_shard([model], model.blocks, reshard_after_forward=False)
        with torch.no_grad():
            found = model(inputs_of(0)).item()
        return found == expected, all(it.isnan().all().item() for it in model.parameters())

    assert run_ranks(evaluate, 2) == [(True, True)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shard_group_size": 3}, r"shard_group_size=3 must divide the 2 replicas"),
        ({"reshard_after_forward": 3}, r"reshard_after_forward=3 must be true, false, or a number that divides the 2"),
        ({"units": [nn.Linear(1, 1)]}, r"units has a Linear that is not in the models"),
    ],
)
def test_wrong_arguments(run_ranks, arguments, message):
    def shard():
        initialize_model_parallel()
        model = make()
        with pytest.raises(ValueError, match=message):
            fully_shard([model], **{"units": model.blocks, **arguments})

    run_ranks(shard, 2)


@pytest.mark.slow  # compiling takes its time
@pytest.mark.parametrize("backend", ["blocks", "aot_eager", "inductor"])
def test_compiled_models_equal_one_process(run_ranks, backend):
    def train_it():
        initialize_model_parallel()
        model = make()
        fully_shard([model], model.blocks)
        optimizer = optimizer_of(model)
        graphs = []

        def count_and_run(graph, inputs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        for block in model.blocks if backend == "blocks" else ():
            block.compile(backend=count_and_run)
        run = model if backend == "blocks" else torch.compile(model, backend=backend)
        for step in range(STEPS):
            with optimizer.overlap_backward():
                run(mine(inputs_of(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert graphs or backend != "blocks"
        with whole_parameters(model.parameters()):
            return {name: it.detach().clone() for name, it in model.named_parameters()}

    for of_rank in run_ranks(train_it, 2, timeout=600):
        assert_equal(of_rank, train_one_process(make()))


def test_sharding_twice_and_models_without_memory_are_refused(run_ranks):
    def shard():
        initialize_model_parallel()
        model = make()
        fully_shard([model], model.blocks)
        with pytest.raises(ValueError, match="sharded already"):
            fully_shard([model], model.blocks)
        with torch.device("meta"):
            empty = Model()
        with pytest.raises(ValueError, match="on the meta device"):
            fully_shard([empty], empty.blocks)

    run_ranks(shard, 2)


def test_replicas_that_start_differently_are_refused(run_ranks):
    def shard():
        initialize_model_parallel()
        torch.manual_seed(active_group("dp").rank)
        model = Model()
        with pytest.raises(ValueError, match="start from different weights"):
            fully_shard([model], model.blocks)

    run_ranks(shard, 2)
