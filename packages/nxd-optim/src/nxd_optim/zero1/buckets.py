"""Which kind of bucket a device gets; outside they are alike."""

from collections.abc import Sequence

from nxd_state import Group
from torch import Tensor

from nxd_optim.zero1.even_bucket import EvenBucket
from nxd_optim.zero1.flat_bucket import Dtypes, FlatBucket

Bucket = FlatBucket | EvenBucket


def make_bucket(parameters: Sequence[Tensor], group: Group, dtypes: Dtypes) -> Bucket:
    """A bucket of parameters of one dtype and device."""
    kind = EvenBucket if parameters[0].device.type == "xla" else FlatBucket
    return kind(parameters, group, dtypes)
