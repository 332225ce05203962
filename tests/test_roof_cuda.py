"""The GPU's roof: measured where there is an NVIDIA GPU, and a clear answer where there is none."""

import pytest
import torch

from lab import gpu_roof, results

HERE = torch.cuda.is_available()


@pytest.mark.skipif(HERE, reason="this machine has a GPU")
def test_without_a_gpu_there_is_no_roof_and_a_clear_error():
    from lab.roof_cuda import measure_gpu_roof

    assert gpu_roof() is None
    with pytest.raises(RuntimeError, match="no NVIDIA GPU that PyTorch can use"):
        measure_gpu_roof()


@pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
def test_a_gpus_roof_is_plausible_and_measured_once(capsys):
    roof = gpu_roof()
    assert roof.card == torch.cuda.get_device_name() and "measuring the roof" in capsys.readouterr().out
    assert 0 < roof.copy <= 1.2 * roof.read and roof.flops > roof.read and roof.by_threads == {}
    assert gpu_roof() is roof and capsys.readouterr().out == ""


def test_the_stored_h200_reads_no_faster_than_its_data_sheet():
    (h200,) = [item.roof for item in results.stored("roof") if item.card == "NVIDIA H200"]
    assert 0.9 * 4800e9 < h200.read < 4800e9
