"""Copies between host and device for which the host does not wait."""

import threading

import nxd_state
import pytest
import torch
from nxd_state import read_later, send_to_device

BATCH = torch.arange(6).view(2, 3)


def test_on_the_cpu_nothing_is_copied():
    assert send_to_device(BATCH, torch.device("cpu")) is BATCH


def test_values_asked_for_are_those_of_the_tensor_without_its_history():
    loss = torch.ones((), requires_grad=True) * 3

    value = read_later(loss)()

    assert value.item() == 3
    assert not value.requires_grad


@pytest.mark.xla
@pytest.mark.neuron
def test_what_another_thread_sends_to_xla_is_no_part_of_the_graph_under_way(monkeypatch):
    from nxd_doctor.graphs.pending_graph import is_pending, pending_graph

    monkeypatch.setenv("NXD_DEVICE", "xla")
    device, sent = nxd_state.get_device(), []
    weight = torch.ones(3, device=device)
    nxd_state.step_boundary()
    product = weight * 2

    thread = threading.Thread(target=lambda: sent.append(send_to_device(BATCH, device)))
    thread.start()
    thread.join()

    assert not is_pending(sent[0])
    assert len(pending_graph().outputs) == 1
    value = read_later(product)
    nxd_state.step_boundary()
    assert value().tolist() == [2, 2, 2]
    assert torch.equal(sent[0].cpu(), BATCH)
