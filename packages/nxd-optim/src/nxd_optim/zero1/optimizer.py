"""`NeuronZero1Optimizer`: an elementwise optimizer whose states and work are sharded over the replicas.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stage 1. Here is what
a user calls and the order of a step; who keeps which weights is in `sharded_weights`, how gradients travel in
`gradients`, memory and messages in `flat_bucket`, saving in `state`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from nxd_state import Group, check_same_start, get_device, widest_float
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_optim.clip import CLIP_EPSILON
from nxd_optim.elementwise import check_elementwise, for_the_cpu
from nxd_optim.load_states import restore_numbers
from nxd_optim.reducer import DEFAULT_BUCKET_BYTES
from nxd_optim.zero1.buckets import Bucket, choose_dtypes, scale_gradients, update_and_gather
from nxd_optim.zero1.flat_bucket import Dtypes
from nxd_optim.zero1.gradients import GradientExchange, OwnGradient, norm_of_parts, own_gradients
from nxd_optim.zero1.memory_report import MemoryReport, memory_report
from nxd_optim.zero1.settings import (
    RankLists,
    check_cap,
    check_grad_norm_groups,
    check_max_norm,
    find_sharding_group,
)
from nxd_optim.zero1.sharded_weights import ShardedWeights
from nxd_optim.zero1.state import (
    StateTensor,
    StoredKeys,
    allocate_state,
    check_rank_state,
    load_rank_state,
    logical_state,
    rank_state,
    read_rank_file,
    write_rank_file,
)


class NeuronZero1Optimizer(Optimizer):
    """Trains like `optimizer_class` on one process with the whole batch; each replica keeps a part of the states.

    A step is::

        for microbatch in microbatches[:-1]:
            loss(microbatch).backward()
        with optimizer.overlap_backward():  # optional: gradients are sent while backward continues
            loss(microbatches[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    `step` averages the gradients over the replicas, adds those of sequence-parallel regions over the tensor-parallel
    ranks (so do not call `reduce_sequence_parallel_gradients`), clips, updates this rank's part of the weights and
    gathers the parts of the others. After it every `.grad` is None. As in torch, a parameter without a gradient on
    any rank is not changed; one that has a gradient on some rank counts as zero on the others.

    It is an ordinary torch optimizer: schedulers change `param_groups`, and `state_dict` gives this rank's part. The
    ranks must start from equal weights; the first step compares them, except on XLA. Parameters move into flat buffers
    when the optimizer is made: assign, move and convert them before. A frozen parameter that is to be trained later is
    added by `add_param_group`.

    Args:
        params: parameters or groups of them, in the same order on every rank.
        optimizer_class: an elementwise one, such as AdamW or SGD with momentum. This is checked by trying it.
        optimizer_dtype: of the weights and states that are updated. float32 if None, or the parameter's own dtype
            where that is wider. Where it differs from the parameter's, this rank keeps master weights for its part.
        grad_clipping: scale the gradients so that the norm of the whole model's is at most `max_norm`.
        max_norm: 1.0 if None.
        pin_layout: accepted for torch-xla's signature; nothing here needs it.
        sharding_groups: the ranks of every group that shares states: those of data times context parallel, as with
            None, or of data parallel alone.
        grad_norm_groups: accepted for torch-xla's signature. Norms count the whole model, as the mesh lays it out.
        lazy_init: do nothing to the parameters until `init_zero` is called.
        bucket_cap_mb_all_gather: most MB of a bucket that a rank sends when parameters are gathered; 0 for no limit.
        bucket_cap_mb_reduce_scatter: most MB of a bucket; 0 for 25. A parameter above it travels alone.
        use_grad_acc_hook: accumulate gradients over microbatches in float32, or the parameter's dtype where wider. The
            sums are then not in `.grad`, so that `model.zero_grad()` does not drop them: call the optimizer's.
        save_master_weights: put master weights into `state_dict` and `sharded_state`. Without them a run resumes from
            the rounded parameters.
        higher_cc_precision: average gradients in float32 or wider as well. The CPU always does so.
        **defaults: for `optimizer_class`.

    Attributes:
        skip_non_finite_steps: whether a step whose gradient norm is infinite or nan changes nothing. Set it at will.
        skipped_steps: how many have been skipped.
        loss_scale: what the loss was multiplied by; `step` divides the gradients by it, in `optimizer_dtype`.

    Raises:
        RuntimeError: there are several ranks but no mesh.
        ValueError: the optimizer is not elementwise, the ranks gave different parameters, or an argument is wrong.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: RankLists | None = None,
        grad_norm_groups: RankLists | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: float = 0,
        bucket_cap_mb_reduce_scatter: float = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        **defaults: Any,
    ) -> None:
        self.inited = self._has_compared = False
        self.optimizer_class = optimizer_class
        self._arguments = defaults
        self.optimizer_dtype = optimizer_dtype
        self.grad_clipping = grad_clipping
        self.max_norm = check_max_norm(max_norm)
        self.pin_layout = pin_layout
        self.sharding_groups = sharding_groups
        self.grad_norm_groups = grad_norm_groups
        self.bucket_cap_mb_all_gather = check_cap("bucket_cap_mb_all_gather", bucket_cap_mb_all_gather)
        self.bucket_cap_mb_reduce_scatter = check_cap("bucket_cap_mb_reduce_scatter", bucket_cap_mb_reduce_scatter)
        self.use_grad_acc_hook = use_grad_acc_hook
        self.save_master_weights = save_master_weights
        self.higher_cc_precision = higher_cc_precision
        self.skip_non_finite_steps = False
        self.skipped_steps = 0
        self.loss_scale = 1.0
        self._grad_norm: Tensor | None = None
        self._weights = ShardedWeights(lambda groups: optimizer_class(groups, **defaults), self._dtypes)
        self._gradient_hooks: list[Callable[[Sequence[OwnGradient]], None]] = []
        super().__init__(params, check_elementwise(optimizer_class, defaults))
        if not lazy_init:
            self.init_zero()

    def init_zero(self) -> None:
        """Move the parameters into buckets, of which each rank updates a part. Only needed after `lazy_init`.

        Where that is done, it is `refresh_master_weights`: scripts call it after loading weights.

        Raises:
            RuntimeError: there are several ranks but no mesh.
            ValueError: parameters on the meta device, or others on another rank; groups that do not fit the ranks.
        """
        if self.inited:
            self.refresh_master_weights()
            return
        self.group: Group = find_sharding_group(self.sharding_groups)
        check_grad_norm_groups(self.grad_norm_groups)
        self.inited = True
        self._shard([p for group in self.param_groups for p in group["params"]])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, at any time but between `overlap_backward` and `step`.

        Raises:
            RuntimeError: between `overlap_backward` and `step`.
            ValueError: as for torch's optimizers, or as for `init_zero`.
        """
        if self.inited:
            self._gradients.sender.refuse("add_param_group()", "overlapping", "leaving", "arrived", "failed")
        super().add_param_group(param_group)
        if self.inited:
            self._gradients.sender.close()
            self._shard(self.param_groups[-1]["params"])

    @property
    def grad_norm(self) -> Tensor | None:
        """The 2-norm of the last step's gradients before clipping; None before the first step or without clipping."""
        return self._grad_norm

    @property
    def base_optimizer(self) -> Optimizer:
        """An `optimizer_class` over the elements that this rank updates, with their state, to inspect.

        Its groups list, for each parameter, this rank's elements, flat; there may be none. Settings are those of now.
        """
        self._check_inited()
        return self._weights.as_one_optimizer(self.param_groups)

    @contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Send each bucket of gradients as soon as backward has filled it. For the last backward before `step` only.

        If the block raises, the step is void: `zero_grad` on every rank drops it. Inside the block, leave the group's
        ranks no other messages to exchange once backward has begun.

        Raises:
            RuntimeError: the last step is not finished, or a parameter gets a second gradient in the block.
        """
        self._check_inited()
        with self._gradients.sender.overlap_backward():
            yield

    @contextmanager
    def last_backward(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """As `overlap_backward`, for those of the parameters that get their last gradient of a step in the block.

        A pipeline's stages have their last backward one after the other, so each gets a block of its own. `synchronize`
        or `step` sends the rest.

        Raises:
            RuntimeError: a block is open or has failed, or a parameter gets a second gradient in it.
        """
        self._check_inited()
        with self._gradients.sender.last_backward(map(id, parameters)):
            yield

    def synchronize(self) -> None:
        """Send the remaining buckets, and wait: this rank then has the mean of its part, and every `.grad` is None.

        More gradients may be accumulated: what further backward passes make is added by the next `synchronize` or
        `step`.

        Raises:
            RuntimeError: inside `overlap_backward`, or after a backward failed whose gradients were leaving.
        """
        self._check_inited()
        self._gradients.sender.synchronize()

    def overlap_forward(self, model: nn.Module) -> None:
        """From now on `step` returns while parameters are still arriving; reading one from its module waits for it.

        `model.state_dict()` waits for all. Code that keeps or lists parameters (`model.parameters()`) must call
        `wait_for_parameters` before reading their values.

        Args:
            model: whose modules hold the parameters.
        """
        self._check_inited()
        self._weights.overlap_forward(model)

    def wait_for_parameters(self) -> None:
        """Return when all parameters are whole; only needed after `overlap_forward`."""
        self._weights.wait()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average, clip, update, gather.

        Args:
            closure: computes loss and gradients; called once.

        Returns:
            What `closure` returned.

        Raises:
            RuntimeError: inside `overlap_backward` or after it failed, or a parameter has moved or was frozen.
            ValueError: at the first step: ranks that hold the same weights have different ones.
        """
        self._check_inited()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._gradients.sender.refuse("step()", "overlapping", "failed")
        self._weights.wait()
        self._weights.check_places()
        self._gradients.check_frozen()
        if not self._has_compared:
            check_same_start(p for group in self.param_groups for p in group["params"])
            self._has_compared = True
        self._weights.refresh_masters(only_stale=True)
        used = self._gradients.complete()
        for hook in self._gradient_hooks:
            hook(own_gradients(self._weights.buckets))
        if self._clip():
            update_and_gather(self.parts(), used, self.param_groups)
            if not self._weights.arrive_in_forward:
                self._weights.wait()
        self._weights.drop_gradients()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a new step; drops a failed or unfinished step, if every rank calls this.

        Args:
            set_to_none: forget the gradients. Otherwise those that there are become zero.

        Raises:
            RuntimeError: inside `overlap_backward`.
        """
        if not self.inited:
            super().zero_grad(set_to_none)
            return
        self._gradients.sender.refuse("zero_grad()", "overlapping")
        self._gradients.sender.drop()
        if set_to_none:
            self._weights.drop_gradients()
        else:
            self._weights.zero_gradients()

    def refresh_master_weights(self) -> None:
        """Take the master weights from the parameters, after these have been loaded or changed."""
        self._weights.refresh_masters(only_stale=False)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the states, in a form that fits this rank of this layout only; see `sharded_state`.

        Returns:
            "param_groups" as of any torch optimizer, "state" by parameter index: flat tensors of the elements that
            this rank owns, "ranges": which those are, "master_weights" if `save_master_weights`, and "skipped_steps".
        """
        self._check_inited()
        self._weights.refresh_masters(only_stale=True)
        own = rank_state(self.parts(), self._indices(), with_masters=self.save_master_weights)
        return super().state_dict() | own | {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave on the same rank of the same layout.

        Without master weights among it, these are taken from the parameters: load the model first.

        Raises:
            ValueError: it is from another layout, or not from this optimizer.
        """
        self._check_inited()
        check_rank_state(state_dict, self.parts(), self._indices())
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.refresh_master_weights()
        load_rank_state(state_dict, self.parts(), self._indices())
        self.skipped_steps = state_dict.get("skipped_steps", 0)

    def sharded_state(self) -> list[StateTensor]:
        """All states as boxes of logical tensors, for checkpoints that load at any layout; they share memory.

        Master weights that `allocate_state` has left to be taken from the parameters are not among them.

        Raises:
            ValueError: a state is neither a tensor nor a number.
        """
        self._check_inited()
        return logical_state(self.parts(), with_masters=self.save_master_weights)

    def parameters_of_wider_masters(self) -> list[Tensor]:
        """The parameters whose values `sharded_state` holds as wider master weights; the same on every rank."""
        self._check_inited()
        if not self.save_master_weights:
            return []
        return [
            parameter
            for bucket, _ in self.parts()
            if bucket.has_masters
            for parameter in bucket.parameters
            if bucket.master_dtype.itemsize > parameter.itemsize and not bucket.has_stale_master(parameter)
        ]

    def allocate_state(self, stored: StoredKeys) -> None:
        """Make room for states of a checkpoint: afterwards the tensors of `sharded_state()` can be filled in place.

        Existing states are dropped. Master weights are to be filled where the checkpoint has them and
        `save_master_weights` is set; elsewhere the next step takes them from the parameters as they are then.

        Args:
            stored: for a parameter, dtype and shape of each of its states by key, "master_weight" among them; shape ()
                is a scalar such as "step". Room is made in the dtype that the optimizer keeps the state in.

        Raises:
            ValueError: the states are not those of such an optimizer.
        """
        self._check_inited()
        allocate_state(self.parts(), stored, with_masters=self.save_master_weights)

    def other_state(self) -> dict[str, Any]:
        """What is to be saved besides `sharded_state` and the groups: numbers, the same on every rank."""
        return {"skipped_steps": self.skipped_steps}

    def settle_state(self, others: Mapping[str, Any]) -> None:
        """To be called when the tensors that `allocate_state` made have been filled.

        Args:
            others: what `other_state` gave; what is missing starts again.
        """
        for _, base in self.parts():
            restore_numbers(base)
        self.skipped_steps = int(others.get("skipped_steps", 0))

    def save_sharded_state_dict(self, output_dir: str | PathLike[str], save_serially: bool = True) -> None:
        """Write each rank's `state_dict` to `optim/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt`. Called by all ranks.

        Args:
            output_dir: a folder that all ranks share; created if missing.
            save_serially: one data-parallel rank at a time, which needs the least memory and bandwidth.

        Raises:
            RuntimeError: a rank could not write; all ranks raise.
        """
        write_rank_file(self.state_dict(), output_dir, serially=save_serially)

    def load_sharded_state_dict(self, output_dir: str | PathLike[str], num_workers_per_step: int = 8) -> None:
        """Read what `save_sharded_state_dict` wrote at the same layout. Called by all ranks.

        Args:
            output_dir: the folder that was given there.
            num_workers_per_step: how many ranks of a host read at a time.

        Raises:
            RuntimeError: a rank could not read its file, or it is from another layout or save; all ranks raise.
        """
        self._check_inited()
        read_rank_file(self.load_state_dict, output_dir, num_workers_per_step)

    def register_gradient_hook(self, hook: Callable[[Sequence[OwnGradient]], None]) -> None:
        """Have `hook` called in every step with the mean gradients of this rank's parts, before they are clipped.

        They are still multiplied by `loss_scale`. Every rank registers its hooks in the same order.
        """
        self._gradient_hooks.append(hook)

    def memory_report(self) -> MemoryReport:
        """The memory that this rank keeps for training, in bytes: measured, and predicted from the model's sizes."""
        self._check_inited()
        arguments = for_the_cpu(self._arguments)
        return memory_report(self.parts(), lambda p: self.optimizer_class(p, **arguments))

    def parts(self) -> Iterator[tuple[Bucket, Optimizer]]:
        """Each bucket with the optimizer that updates this rank's part of it."""
        return self._weights.parts()

    def _indices(self) -> dict[int, int]:
        """The index of each parameter, by id, as torch counts them in a `state_dict`."""
        parameters = (p for group in self.param_groups for p in group["params"])
        return {id(parameter): index for index, parameter in enumerate(parameters)}

    def _check_inited(self) -> None:
        if not self.inited:
            raise RuntimeError("the optimizer was made with lazy_init=True; call init_zero() first")

    def _shard(self, parameters: Sequence[Tensor]) -> None:
        """Take parameters of `param_groups` into the buckets, and watch the gradients of all."""
        self._weights.add(parameters, self.param_groups, self.group, bucket_bytes=self._bucket_bytes())
        frozen = [p for group in self.param_groups for p in group["params"] if not p.requires_grad]
        self._gradients = GradientExchange(self._weights.buckets, self.group, frozen)

    def _bucket_bytes(self) -> int:
        cap = self.bucket_cap_mb_reduce_scatter * 2**20 or DEFAULT_BUCKET_BYTES
        if self.bucket_cap_mb_all_gather:
            cap = min(cap, self.bucket_cap_mb_all_gather * 2**20 * self.group.size)
        return int(cap)

    def _dtypes(self, parameter: torch.dtype) -> Dtypes:
        return choose_dtypes(
            parameter,
            self.optimizer_dtype,
            accumulate_wide=self.use_grad_acc_hook,
            average_wide=self.higher_cc_precision,
        )

    def _clip(self) -> bool:
        """Scale the gradients by their norm and the loss scale; whether the step is to be taken."""
        buckets = self._weights.buckets
        device = buckets[0].device if buckets else get_device()
        scale = torch.tensor(1.0 / self.loss_scale, dtype=widest_float(device), device=device)
        self._grad_norm = None
        if self.grad_clipping or self.skip_non_finite_steps:
            norm = norm_of_parts(buckets, self.group, device) / self.loss_scale
            if self.grad_clipping:
                self._grad_norm = norm
                scale = scale * torch.clamp(self.max_norm / (norm + CLIP_EPSILON), max=1.0)
            if self.skip_non_finite_steps and not norm.isfinite():
                self.skipped_steps += 1
                return False
        scale_gradients(buckets, scale)
        return True
