"""`NeuronZero1Optimizer`: an elementwise optimizer whose states and work are sharded over the replicas.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stages 1 and 2; its
parameters may be sharded, too (stage 3), see `fully_sharded`. Here are the calls and the order of a step;
`sharded_weights` assigns weights to ranks, `gradients` sends gradients, `flat_bucket` manages memory, `state` saves.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from nxd_state import Group, check_same_start, get_device, widest_float
from nxd_state.sharded_values import holder_of
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_optim.clip import GradientRange, checked_max_norm, clip_coefficient, norm_of_gradients
from nxd_optim.elementwise import check_elementwise, for_the_cpu
from nxd_optim.groups_and_states import restore_numbers
from nxd_optim.placement import RankLists, check_grad_norm_groups, find_sharding_group, sharding_placements
from nxd_optim.state_tensors import StateTensor
from nxd_optim.zero import state
from nxd_optim.zero.bucket import Bucket, Dtypes, mean_gradients
from nxd_optim.zero.fully_sharded import hint_at_bypassed_outputs
from nxd_optim.zero.gradients import GradientExchange
from nxd_optim.zero.sharded_weights import ShardedWeights, bucket_bytes, check_caps


@dataclass(frozen=True)
class _ReadyGradients:
    """Mean gradients of a step, scaled and clipped.

    Attributes:
        used: ids of the parameters to update.
        skips: whether the step changes nothing, because the gradients are not finite.
    """

    used: Set[int]
    skips: bool


class NeuronZero1Optimizer(Optimizer):
    """Trains like `optimizer_class` on one process with the whole batch; each replica keeps a part of the states.

    A step is::

        for microbatch in microbatches[:-1]:
            loss(microbatch).backward()
        with optimizer.overlap_backward():  # optional: gradients are sent while backward continues
            loss(microbatches[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    `step` averages the gradients over the replicas, sums those of sequence-parallel regions over the tensor-parallel
    ranks (so do not call `reduce_sequence_parallel_gradients`), clips, updates this rank's part of the weights and
    gathers the other parts. After it every `.grad` is None. As in torch, a parameter without a gradient on any rank is
    not changed; one that has a gradient on some rank counts as zero on the others.

    It is an ordinary torch optimizer: schedulers change `param_groups`, and `state_dict` returns this rank's part. The
    ranks must start from equal weights; the first step compares them, except on XLA. The constructor moves parameters
    into flat buffers: assign, move and convert them before. To train a frozen parameter later, add it by
    `add_param_group`.

    Args:
        params: parameters or parameter groups, in the same order on every rank.
        optimizer_class: an elementwise optimizer, such as AdamW or SGD with momentum, which is checked by a trial; or
            `Muon` or `Adafactor`, whose instances compute together what needs whole matrices.
        optimizer_dtype: dtype of the weights and states that are updated; float32 if None, or the parameter's own dtype
            if that is wider. If it differs from the parameter's, this rank keeps master weights for its part.
        grad_clipping: whether to scale the gradients so that the norm of the whole model's is at most `max_norm`.
        max_norm: maximum gradient norm; 1.0 if None.
        pin_layout: no effect; accepted for torch-xla's signature.
        sharding_groups: the ranks of every group that shares states: those of data times context parallel, the default,
            or of data parallel alone.
        grad_norm_groups: no effect; accepted for torch-xla's signature. Norms count the whole model.
        lazy_init: whether to leave the parameters as they are until `init_zero` is called.
        bucket_cap_mb_all_gather: maximum MB of a bucket that a rank sends when parameters are gathered; 0 for no limit.
        bucket_cap_mb_reduce_scatter: maximum MB of a bucket; 0 for 25. A larger parameter is sent alone.
        use_grad_acc_hook: whether to accumulate gradients over microbatches in float32, or the parameter's dtype if
            that is wider. The sums are then not in `.grad`, so `model.zero_grad()` does not drop them: call the
            optimizer's.
        save_master_weights: whether `state_dict` and `sharded_state` include master weights. Without them a run resumes
            from the rounded parameters.
        higher_cc_precision: whether to average gradients in float32 or wider as well. The CPU always does so.
        shard_gradients: whether `each_backward` averages the gradients of every microbatch, so that a rank keeps the
            sum of its part only (ZeRO-2). Parameters that `fully_shard` has sharded stay so (ZeRO-3).
        shard_group_size: number of neighboring replicas that share states (hybrid sharding); the others mirror them.
            None for all replicas.
        offload: whether this rank's part of mean gradients, states and master weights is kept in host memory, and
            updated there by torch's fused kernel (ZeRO-Offload). So are those of parameters that `fully_shard` keeps
            there. On the CPU it has no effect.
        **defaults: arguments of `optimizer_class`.

    Attributes:
        grad_norm: the 2-norm of the last step's gradients before clipping; None before the first step or without
            clipping.
        skip_non_finite_steps: whether a step whose gradient norm is infinite or NaN changes nothing; may be changed at
            any time.
        skipped_steps: number of steps skipped so far.
        loss_scale: factor of the loss; `step` divides the gradients by it, in `optimizer_dtype`.

    Raises:
        RuntimeError: there are several ranks but no mesh.
        ValueError: the optimizer is not elementwise, the ranks passed different parameters, or an argument is wrong.
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
        shard_gradients: bool = False,
        shard_group_size: int | None = None,
        offload: bool = False,
        **defaults: Any,
    ) -> None:
        self.inited = self._has_compared = False
        self.optimizer_class = optimizer_class
        self._arguments = defaults
        self.optimizer_dtype = optimizer_dtype
        self.grad_clipping = grad_clipping
        switch = "; pass grad_clipping=False to switch clipping off"
        self.max_norm = 1.0 if max_norm is None else checked_max_norm(max_norm, switch)
        self.pin_layout = pin_layout
        self.sharding_groups, self.grad_norm_groups = sharding_groups, grad_norm_groups
        check_caps(bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter)
        self.bucket_cap_mb_all_gather = bucket_cap_mb_all_gather
        self.bucket_cap_mb_reduce_scatter = bucket_cap_mb_reduce_scatter
        self.use_grad_acc_hook = use_grad_acc_hook
        self.save_master_weights = save_master_weights
        self.higher_cc_precision = higher_cc_precision
        self.shard_gradients, self.shard_group_size = shard_gradients, shard_group_size
        self.skip_non_finite_steps, self.skipped_steps = False, 0
        self.loss_scale = 1.0
        self.grad_norm: Tensor | None = None
        self._ready: _ReadyGradients | None = None  # from `clip_grad_norm` to `step`
        self._weights = ShardedWeights(
            lambda groups: optimizer_class(groups, **defaults),
            lambda parameter: Dtypes.choose(
                parameter, optimizer_dtype, accumulate_wide=use_grad_acc_hook, average_wide=higher_cc_precision
            ),
            offload=offload,
        )
        self._gradient_hooks: list[Callable[[Sequence[GradientRange]], None]] = []
        super().__init__(params, check_elementwise(optimizer_class, defaults))
        if not lazy_init:
            self.init_zero()

    def init_zero(self) -> None:
        """Move the parameters into buckets, of which each rank updates a part. Only needed after `lazy_init`.

        Calling it again is `refresh_master_weights`: scripts call it after loading weights.

        Raises:
            RuntimeError: there are several ranks but no mesh.
            ValueError: parameters are on the meta device or differ between ranks, or the groups do not fit the ranks.
        """
        if self.inited:
            self.refresh_master_weights()
            return
        self.group: Group = find_sharding_group(self.sharding_groups)
        self.placements = sharding_placements(self.group, self.shard_group_size)
        check_grad_norm_groups(self.grad_norm_groups)
        self.inited = True
        self._shard(self._parameters())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings, at any time except between `overlap_backward` and `step`.

        Raises:
            RuntimeError: it is called between `overlap_backward` or `clip_grad_norm` and `step`.
            ValueError: as for torch's optimizers, or as for `init_zero`.
        """
        if self.inited:
            self._gradients.sender.refuse("add_param_group()", "overlapping", "leaving", "arrived", "failed", "held")
        super().add_param_group(param_group)
        if self.inited:
            self._gradients.sender.close()
            self._shard(self.param_groups[-1]["params"])

    @property
    def base_optimizer(self) -> Optimizer:
        """An `optimizer_class` over the elements that this rank updates, with their state, for inspection.

        Its groups have the current settings and list this rank's elements of each parameter, flat and possibly none.
        """
        self._check_inited()
        return self._weights.as_one_optimizer(self.param_groups)

    def overlap_backward(self) -> AbstractContextManager[None]:
        """Send each bucket of gradients as soon as backward has filled it. For the last backward before `step` only.

        If the block raises, the step is invalid: `zero_grad` on every rank drops it. Once backward has begun in the
        block, the group's ranks must not exchange other messages.

        Raises:
            RuntimeError: the last step is not finished, or a parameter gets a second gradient in the block.
        """
        self._check_inited()
        return hint_at_bypassed_outputs(self._gradients.sender.overlap_backward(), self._parameters())

    def last_backward(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Like `GradientReducer.last_backward`; `synchronize` or `step` sends the rest."""
        self._check_inited()
        return hint_at_bypassed_outputs(self._gradients.sender.last_backward(map(id, parameters)), self._parameters())

    def each_backward(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Average the gradients that a backward of one microbatch adds to these parameters, at most one each.

        They are added to this rank's sum of its part, and more may follow.

        Raises:
            RuntimeError: a block is open or has failed, or a parameter gets a second gradient in it.
        """
        self._check_inited()
        return hint_at_bypassed_outputs(self._gradients.sender.each_backward(map(id, parameters)), self._parameters())

    def synchronize(self) -> None:
        """Send the remaining buckets and wait: this rank then has the mean of its part, and every `.grad` is None.

        More gradients may be accumulated: the next `synchronize` or `step` adds those of further backward passes.

        Raises:
            RuntimeError: inside `overlap_backward`, or after a backward failed while its gradients were being sent.
        """
        self._check_inited()
        self._gradients.sender.synchronize()

    def overlap_forward(self, model: nn.Module) -> None:
        """Make `step` return while parameters are still arriving; reading one from its module waits for it.

        `model.state_dict()` waits for all. Code that keeps or lists parameters (`model.parameters()`) must call
        `wait_for_parameters` before reading their values.

        Args:
            model: the model whose modules hold the parameters.
        """
        self._check_inited()
        self._weights.overlap_forward(model)

    def wait_for_parameters(self) -> None:
        """Return when all parameters are whole; only needed after `overlap_forward`."""
        self._weights.wait()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Average gradients as `step` does, and scale them so that the norm of the whole model's is at most `max_norm`.

        The next `step` then only updates. Called by all ranks, after the last backward of a step; not with
        `grad_clipping`.

        Args:
            max_norm: maximum norm; inf to change no gradient.

        Returns:
            The norm before clipping, 0-d, the same on every rank; it is `grad_norm`, too.

        Raises:
            RuntimeError: `grad_clipping` is set, a second call before `step` or `zero_grad`, or as for `step`.
            ValueError: `max_norm` is negative or not a number, or as for `step`.
        """
        self._check_inited()
        max_norm = checked_max_norm(max_norm)
        if self.grad_clipping:
            raise RuntimeError(
                f"step() clips at max_norm={self.max_norm} already; pass grad_clipping=False to call clip_grad_norm()"
            )
        self._ready = self._make_ready("clip_grad_norm()", max_norm)
        self._gradients.sender.hold()
        assert self.grad_norm is not None
        return self.grad_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average, clip, update, gather. After `clip_grad_norm`, only update and gather.

        Args:
            closure: function that computes loss and gradients; called once.

        Returns:
            The result of `closure`.

        Raises:
            RuntimeError: inside `overlap_backward` or after it failed, a parameter has moved or was frozen, or a
                closure is given after `clip_grad_norm`.
            ValueError: on the first step: ranks that should hold the same weights have different ones.
        """
        self._check_inited()
        loss = None
        if closure is not None:
            self._gradients.sender.refuse("step(closure)", "held")
            with torch.enable_grad():
                loss = closure()
        ready = self._ready or self._make_ready("step()", self.max_norm if self.grad_clipping else None)
        if ready.skips:
            self.skipped_steps += 1
        else:
            self._weights.update(ready.used, self.param_groups)
        self._weights.drop_gradients()
        self._ready = None
        self._gradients.sender.release()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a new step; drops a failed or unfinished step if every rank calls this.

        Args:
            set_to_none: whether to drop the gradients; otherwise existing ones become zero.

        Raises:
            RuntimeError: inside `overlap_backward`.
        """
        if not self.inited:
            super().zero_grad(set_to_none)
            return
        self._gradients.sender.refuse("zero_grad()", "overlapping")
        self._gradients.sender.drop()
        self._ready = None
        if set_to_none:
            self._weights.drop_gradients()
        else:
            self._weights.zero_gradients()

    def refresh_master_weights(self) -> None:
        """Set the master weights from the parameters, after these have been loaded or changed."""
        self._weights.refresh_masters(only_stale=False)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the states, in a form that fits this rank of this layout; see `sharded_state`.

        Returns:
            "param_groups" as in any torch optimizer; "state" by parameter index, flat tensors of the elements that
            this rank owns; "ranges", the ranges of these elements; "master_weights" if `save_master_weights`; and
            "skipped_steps".
        """
        self._weights.refresh_masters(only_stale=True)
        own = state.rank_state(self.parts(), self._indices(), with_masters=self.save_master_weights)
        return super().state_dict() | own | self.other_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of the same rank of the same layout.

        Without master weights in it, they are set from the parameters: load the model first.

        Raises:
            ValueError: it belongs to another layout or another optimizer.
        """
        state.check_rank_state(state_dict, self.parts(), self._indices())
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.refresh_master_weights()
        state.load_rank_state(state_dict, self.parts(), self._indices())
        self.skipped_steps = state_dict.get("skipped_steps", 0)

    def sharded_state(self) -> list[StateTensor]:
        """Return all states as boxes of logical tensors, for checkpoints that load at any layout; they share memory.

        Master weights that the next step sets from the parameters (see `allocate_state`) are left out.

        Raises:
            ValueError: a state is neither a tensor nor a number.
        """
        return state.logical_state(self.parts(), with_masters=self.save_master_weights)

    def parameters_of_wider_masters(self) -> list[Tensor]:
        """Return the parameters that `sharded_state` holds as wider master weights; the same on every rank."""
        return state.parameters_of_wider_masters(self.parts()) if self.save_master_weights else []

    def allocate_state(self, stored: state.StoredKeys) -> None:
        """Allocate memory for states of a checkpoint: the tensors of `sharded_state()` can then be filled in place.

        Existing states are dropped. Master weights are allocated if the checkpoint has them and `save_master_weights`
        is set; otherwise the next step sets them from the parameters.

        Args:
            stored: function from a parameter to the dtype and shape of each of its states by key, including
                "master_weight"; shape () is a scalar such as "step". States are allocated in the dtype in which the
                optimizer keeps them.

        Raises:
            ValueError: the states belong to another class of optimizer.
        """
        state.allocate_state(self.parts(), stored, with_masters=self.save_master_weights)

    def other_state(self) -> dict[str, Any]:
        """Return the numbers to save besides `sharded_state` and the groups; the same on every rank."""
        return {"skipped_steps": self.skipped_steps}

    def finish_loading(self, others: Mapping[str, Any]) -> None:
        """Finish loading, once the tensors that `allocate_state` made are filled.

        Args:
            others: result of `other_state`; missing numbers restart.
        """
        for _, base in self.parts():
            restore_numbers(base)
        self.skipped_steps = int(others.get("skipped_steps", 0))

    def save_sharded_state_dict(self, output_dir: str | PathLike[str], save_serially: bool = True) -> None:
        """Write each rank's `state_dict` to `optim/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt`. Called by all ranks.

        Args:
            output_dir: a folder that all ranks share; created if missing.
            save_serially: whether data-parallel ranks write one at a time, which needs the least memory and bandwidth.

        Raises:
            RuntimeError: a rank could not write; all ranks raise.
        """
        state.write_rank_file(self.state_dict(), output_dir, serially=save_serially)

    def load_sharded_state_dict(self, output_dir: str | PathLike[str], num_workers_per_step: int = 8) -> None:
        """Load the files of `save_sharded_state_dict` at the same layout. Called by all ranks.

        Args:
            output_dir: the folder passed to `save_sharded_state_dict`.
            num_workers_per_step: number of ranks of a host that read at a time.

        Raises:
            RuntimeError: a rank could not read its file, or it is from another layout or save; all ranks raise.
        """
        self._check_inited()
        state.read_rank_file(self.load_state_dict, output_dir, num_workers_per_step)

    def register_gradient_hook(self, hook: Callable[[Sequence[GradientRange]], None]) -> None:
        """Call `hook` in every step with the mean gradients of this rank's parts, before they are unscaled and clipped.

        Every rank registers its hooks in the same order.
        """
        self._gradient_hooks.append(hook)

    def memory_report(self) -> state.MemoryReport:
        """Return the bytes that this rank keeps for training: measured, and predicted from the model's sizes."""
        return state.memory_report(
            self.parts(),
            lambda groups: self.optimizer_class(groups, **for_the_cpu(self._arguments)),
            self.param_groups,
        )

    def parts(self) -> Iterator[tuple[Bucket, Optimizer]]:
        """Return each bucket with the optimizer that updates this rank's part of it."""
        self._check_inited()
        return self._weights.parts()

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _indices(self) -> dict[int, int]:
        """Return the index of each parameter, by id, as torch counts them in a `state_dict`."""
        return {id(parameter): index for index, parameter in enumerate(self._parameters())}

    def _check_inited(self) -> None:
        if not self.inited:
            raise RuntimeError("the optimizer was created with lazy_init=True; call init_zero() first")

    def _shard(self, parameters: Sequence[Tensor]) -> None:
        """Move parameters of `param_groups` into buckets, and watch the gradients of all."""
        caps = self.bucket_cap_mb_all_gather, self.bucket_cap_mb_reduce_scatter
        size = bucket_bytes(*caps, replicas=self.group.size)
        self._weights.add(parameters, self.param_groups, self.group, self.placements, bucket_bytes=size)
        frozen = [parameter for parameter in self._parameters() if not parameter.requires_grad]
        self._gradients = GradientExchange(self._weights.buckets, self.placements, frozen)

    def _make_ready(self, call: str, max_norm: float | None) -> _ReadyGradients:
        """Average the gradients of a step, divide them by the loss scale, and clip them unless `max_norm` is None.

        Args:
            call: the public call that does so, for errors.
            max_norm: maximum norm of the whole model's gradients.
        """
        self._gradients.sender.refuse(call, "overlapping", "failed", "held")
        self._weights.wait()
        self._weights.check_places()
        self._gradients.check_frozen()
        if not self._has_compared:  # `fully_shard` has compared those that it shards
            check_same_start(it for it in self._parameters() if holder_of(it) is None)
            self._has_compared = True
        self._weights.refresh_masters(only_stale=True)
        used = self._gradients.complete()
        for hook in self._gradient_hooks:
            hook(mean_gradients(self._weights.buckets))
        return _ReadyGradients(used, skips=not self._scale_gradients(max_norm))

    def _scale_gradients(self, max_norm: float | None) -> bool:
        """Scale the gradients by their norm and the loss scale; returns whether to take the step."""
        buckets = self._weights.buckets
        device = buckets[0].device if buckets else get_device()
        scale = torch.tensor(1.0 / self.loss_scale, dtype=widest_float(device), device=device)
        self.grad_norm = None
        if max_norm is not None or self.skip_non_finite_steps:
            norm = norm_of_gradients(mean_gradients(buckets), device, sharded=self.placements) / self.loss_scale
            if max_norm is not None:
                self.grad_norm = norm
                scale = scale * clip_coefficient(norm, max_norm)
            if self.skip_non_finite_steps and not norm.isfinite():
                return False
        self._weights.scale_gradients(scale)
        return True
