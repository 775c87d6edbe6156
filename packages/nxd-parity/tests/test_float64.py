"""`InFloat64` computes in float64 what asks for float32, in backward, too."""

import torch
from nxd_parity import InFloat64
from torch.utils.checkpoint import checkpoint


def test_every_way_into_backward_computes_in_float64_what_it_computes_again():
    seen, numbers = [], torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def weights(given):
        seen.append(given.float().dtype)
        return given.softmax(-1, dtype=torch.float32)

    with InFloat64():
        checkpoint(weights, numbers, use_reentrant=False)[:, 0].sum().backward()
        found, numbers.grad = numbers.grad, None
        loss = checkpoint(weights, numbers, use_reentrant=False)[:, 0].sum()
        (by_grad,) = torch.autograd.grad(loss, numbers)
        root, leaf = (torch.autograd.graph.get_gradient_edge(it) for it in (numbers.softmax(-1)[:, 0], numbers))
        (by_edges,) = torch.autograd.grad(root, leaf, torch.ones(3), retain_graph=True)
        torch.autograd.backward(root, torch.ones(3), inputs=[numbers])  # as zero-bubble schedules
        by_backward, numbers.grad = numbers.grad, None
    numbers.softmax(-1)[:, 0].sum().backward()

    assert seen == [torch.float64] * 4
    for it in (found, by_grad, by_edges, by_backward):
        assert torch.equal(it, numbers.grad)
    assert torch.get_default_dtype() is torch.float32
