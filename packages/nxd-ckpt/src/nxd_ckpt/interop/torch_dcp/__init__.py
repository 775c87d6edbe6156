"""torch's distributed checkpoint: its `save` and `load` on top of this package's format, and its own folders.

Pass `NxdStorageWriter` and `NxdStorageReader` to `torch.distributed.checkpoint.save` and `load` as `storage_writer` and
`storage_reader`. `open_torch_dcp` and `write_torch_dcp` read and write the folders of torch's own
file system writer.
"""

from nxd_ckpt.interop.torch_dcp.folder import TorchDcpFolder, open_torch_dcp, write_torch_dcp
from nxd_ckpt.interop.torch_dcp.storage import NxdStorageReader, NxdStorageWriter

__all__ = ["NxdStorageWriter", "NxdStorageReader", "TorchDcpFolder", "open_torch_dcp", "write_torch_dcp"]
