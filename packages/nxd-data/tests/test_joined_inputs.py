"""Inputs of single images are joined to those of all where the processor's own are the same."""

import pytest
import torch
from nxd_data.joined_inputs import find_dims, join


def _image(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize("dim", [0, 1])
def test_inputs_are_joined_by_the_dimension_that_grows_and_padded_in_others(dim: int) -> None:
    shape = [1, 1, 2, 3]
    apart = [{"pixels": _image(*shape), "size": torch.tensor([[2, 3]])}, {"pixels": _image(1, 1, 4, 2)}]
    apart[1]["size"] = torch.tensor([[4, 2]])
    shape[dim] = 2
    together = {"pixels": torch.zeros(*shape[:2], 4, 3), "size": torch.tensor([[2, 3], [4, 2]])}
    together["pixels"].flatten(0, 1)[0, :2] = _image(2, 3)
    together["pixels"].flatten(0, 1)[1, :, :2] = _image(4, 2)

    dims = find_dims(apart, together)

    assert dims == {"pixels": dim, "size": 0}
    torch.testing.assert_close(join(apart, dims), together)


@pytest.mark.parametrize(
    "together",
    [
        {"pixels": torch.full((2, 3), 0.5)},  # depends on all images
        {"pixels": torch.zeros(2, 3, 1)},
        {"pixels": torch.zeros(2, 3), "tiles": torch.zeros(2)},
    ],
)
def test_inputs_that_are_not_those_of_the_images_are_not_joined(together: dict[str, torch.Tensor]) -> None:
    apart = [{"pixels": torch.zeros(1, 3)}, {"pixels": torch.zeros(1, 3)}]

    assert find_dims(apart, together) is None
