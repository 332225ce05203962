"""What a card is said to have: by its compute capability, and as an H200 on the CPU."""

import pytest
import torch

from lab import card

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


def test_the_simt_machine_answers_as_an_h200():
    assert (card.multiprocessors(CPU), card.shared_memory(CPU), card.starts_early(CPU)) == (132, 227 * 1024, True)


@pytest.mark.parametrize(
    "capability, kilobytes, early", [((9, 0), 227, True), ((8, 0), 163, False), ((8, 6), 99, False)]
)
def test_by_compute_capability(monkeypatch, capability, kilobytes, early):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert card.shared_memory(CARD) == 1024 * kilobytes and card.starts_early(CARD) is early
