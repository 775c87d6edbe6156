"""Training begun with FSDP2, as torch, accelerate and torchtitan save it, or DeepSpeed, goes on here at another layout.

Two ranks train a Llama of transformers with `fully_shard` and save it; `nxd-ckpt convert` and `load_checkpoint`
continue with TP 2 or PP 2. The reference is one process that never stopped.
"""

import nxd_ckpt
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from neuronx_distributed.trainer import load_checkpoint
from nxd_ckpt.cli.main import main
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from writers_and_readers import TOKENS, begin_by_train, differing, made_by_script, transformers_llama

modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")


class WideNorm(modeling_llama.LlamaRMSNorm):
    """In the dtype of its input, as all the rest is: transformers computes norms in float32, also for float64."""

    def forward(self, hidden):
        inverse_rms = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (hidden * inverse_rms)


def llama():
    """The model of transformers in float64 throughout, so that it equals ours."""
    model = transformers_llama()
    for module in model.modules():
        if isinstance(module, modeling_llama.LlamaRMSNorm):
            module.__class__ = WideNorm
    return model


def begun():
    """A model on each rank, and AdamW with the groups of `made_by_script`."""
    torch.manual_seed(0)
    model = llama()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, 0.01), (False, 0.0))
    ]
    return model, torch.optim.AdamW(groups, lr=1e-3)


def step(model, optimizer):
    """One step on all ranks' equal batches; returns the loss before it."""
    logits = model(input_ids=TOKENS[:, :-1]).logits  # the loss of transformers is in float32
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:-1].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as the documented API does by default
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save_by_torch(folder, model, optimizer):
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states, "step": 2}, checkpoint_id=folder)


def save_as_torchtitan(folder, model, optimizer):
    """Weights at the top, and flat states of the optimizer: torchtitan's components/checkpoint.py."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    dcp.save({**weights, "optimizer": states, "train_state": {"step": 2}}, checkpoint_id=folder)


def save_sharded_as_accelerate(folder, model, optimizer):
    """`SHARDED_STATE_DICT`: accelerate's utils/fsdp_utils.py."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=folder / "optimizer_0")


def save_whole_as_accelerate(folder, model, optimizer):
    """`FULL_STATE_DICT`: accelerate's utils/fsdp_utils.py."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        folder.mkdir()
        torch.save(weights, folder / "pytorch_model_fsdp.bin")
        torch.save(states, folder / "optimizer.bin")


def save_as_universal(folder, model, optimizer):
    """What DeepSpeed's ds_to_universal.py writes of ZeRO 3 (see packages/nxd-ckpt/tests/interop/test_deepspeed.py)."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        for name, weight in weights.items():
            (folder / "zero" / name).mkdir(parents=True)
            of_name = states["state"][name]
            for key, value in (
                ("fp32", weight),
                ("exp_avg", of_name["exp_avg"]),
                ("exp_avg_sq", of_name["exp_avg_sq"]),
            ):
                torch.save(value.flatten(), folder / "zero" / name / f"{key}.pt")
        shapes = {name: weight.shape for name, weight in weights.items()}
        model_states = {"param_shapes": [shapes], "global_steps": 2, "skipped_steps": 0}
        torch.save(model_states, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")


WRITERS = {
    "torch": save_by_torch,
    "torchtitan": save_as_torchtitan,
    "accelerate, sharded": save_sharded_as_accelerate,
    "accelerate, whole": save_whole_as_accelerate,
    "DeepSpeed, universal": save_as_universal,
}


def shifted():
    """Labels of our model, which shifts none; the last position has none, as in transformers."""
    labels = TOKENS[:, 1:].clone()
    labels[:, -1] = -100
    return labels


def train_and_save(save, folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    model, optimizer = begun()
    for _ in range(2):
        step(model, optimizer)
    save(folder, model, optimizer)


def go_on(checkpoints, tp):
    """With TP 2 the model of transformers, with PP 2 ours, since the loss of transformers in a pipeline is float32."""
    model_fn, labels = (llama, TOKENS[:, :-1]) if tp == 2 else (None, shifted())
    model, optimizer, _ = made_by_script(tp=tp, pp=2 // tp, model_fn=model_fn, seed=7)
    load_checkpoint(checkpoints, model=model, optimizer=optimizer)
    different = differing(model, checkpoints, optimizer)
    losses = []
    for _ in range(2):
        losses.append(model.run_train(input_ids=TOKENS[:, :-1], labels=labels))
        optimizer.step()
        optimizer.zero_grad()
    return different, [None if loss is None else float(loss) for loss in losses]


@pytest.fixture(scope="module")
def undisturbed():
    """The losses of steps 3 and 4 in one process, and the states after step 2."""
    model, optimizer = begun()
    for _ in range(2):
        step(model, optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {
        f"optimizer/{names[parameter]}/{key}": value.clone()
        for parameter, of_parameter in optimizer.state.items()
        for key, value in of_parameter.items()
    }
    return [step(model, optimizer) for _ in range(2)], states


@pytest.mark.sample(3)
@pytest.mark.parametrize("tp", [2, 1])
@pytest.mark.parametrize("writer", WRITERS)
def test_training_goes_on_as_one_process_at_another_layout(run_ranks, tmp_path, undisturbed, writer, tp):
    run_ranks(train_and_save, 2, WRITERS[writer], tmp_path / "old")
    source = ["--from", "deepspeed" if "DeepSpeed" in writer else "fsdp"]

    command = ["convert", str(tmp_path / "old"), str(tmp_path / "new"), *source, "--to", "nxd", "--target-tag", "start"]
    assert main(command) == 0
    results = run_ranks(go_on, 2, tmp_path / "new", tp)

    losses, states = undisturbed
    checkpoint = nxd_ckpt.open_checkpoint(tmp_path / "new")
    for name, value in states.items():
        torch.testing.assert_close(checkpoint.read(name), value, rtol=1e-10, atol=1e-18)
    assert [different for different, _ in results] == [[], []]
    found = [its for _, its in results if None not in its]
    assert found
    for its in found:
        torch.testing.assert_close(
            torch.tensor(its, dtype=torch.float64), torch.tensor(losses, dtype=torch.float64), rtol=1e-10, atol=0
        )


def test_nxd_train_begins_with_the_weights(run_ranks, tmp_path, text):
    run_ranks(train_and_save, 2, save_sharded_as_accelerate, tmp_path / "old")
    assert main(["convert", str(tmp_path / "old"), str(tmp_path / "new"), "--to", "nxd", "--target-tag", "start"]) == 0

    assert run_ranks(begin_by_train, 2, tmp_path / "new", tmp_path / "run", text, transformers_llama, 2) == [[], []]
