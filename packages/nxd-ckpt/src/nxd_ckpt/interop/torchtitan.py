"""torchtitan's checkpointer with this package's format: a mixin for its `CheckpointManager`.

torchtitan passes a folder to torch's distributed checkpoint, and finds checkpoints by the files that torch writes. The
mixin adds a storage to these calls, and finds and removes checkpoints by this package's manifests.
"""

import os
import re
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from nxd_ckpt.catalog import list_checkpoints
from nxd_ckpt.interop.torch_dcp import NxdStorageReader, NxdStorageWriter
from nxd_ckpt.retention import retain

_STEP = re.compile(r"step-(\d+)")


class NxdCheckpoints:
    """`class Checkpoints(NxdCheckpoints, CheckpointManager)`, with `torchtitan.components.checkpoint`'s manager.

    Its configuration still applies. `keep_latest_k` checkpoints are kept besides the one being saved. Checkpoints in
    Hugging Face's format, and those written by torch's own storage, are handled by torchtitan itself.
    """

    folder: str
    keep_latest_k: int
    pg: "dist.ProcessGroup | None"
    stager: Any
    states: dict[str, Any]

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save and return like torchtitan's own method. The previous save has finished."""
        if to_hf:
            return super().dcp_save(  # type: ignore[misc]
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        if self.keep_latest_k > 0 and dist.get_rank() == 0 and os.path.isdir(self.folder):
            retain(self.folder, keep_last=self.keep_latest_k)
        step = _STEP.search(os.path.basename(checkpoint_id))
        in_a_process = async_mode.value == "async_with_pinned_mem"
        writer = NxdStorageWriter(
            *os.path.split(checkpoint_id),
            step=int(step[1]) if step else None,
            overwrite=True,
            process_group=None if in_a_process else self.pg,
        )
        if async_mode.value == "disabled":
            return dcp.save(state_dict, storage_writer=writer)
        kind = AsyncCheckpointerType.PROCESS if in_a_process else AsyncCheckpointerType.THREAD
        return dcp.async_save(
            state_dict,
            storage_writer=writer,
            process_group=self.pg,
            async_checkpointer_type=kind,
            async_stager=self.stager if in_a_process else None,
        )

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load like torchtitan's own method."""
        if from_hf or os.path.isfile(os.path.join(checkpoint_id, ".metadata")):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)  # type: ignore[misc]
            return
        dcp.load(state_dict, storage_reader=NxdStorageReader(*os.path.split(checkpoint_id)))
        if "model" in self.states:
            self.states["model"].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        """Return the highest step of a complete checkpoint, or -1 if there are none."""
        found = [_STEP.fullmatch(info.tag) for info in list_checkpoints(folder or self.folder)]
        of_others: int = super()._find_load_step(folder)  # type: ignore[misc]
        return max([of_others, *(int(match[1]) for match in found if match)])

    def _purge_stale_checkpoints(self) -> None:
        """Do nothing: old checkpoints were removed before the save, which may still be in progress."""
