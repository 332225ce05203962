"""Exchanges between processes of torch.distributed: two of them, gloo to find each other, memory that both map, and
each one half on a SIMT machine of its own, so that stores and looks of the two really race."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent


GLOO = dist.is_available() and dist.is_gloo_available()
CARDS = torch.cuda.device_count() if torch.version.cuda is not None else 0
two_cards = pytest.mark.skipif(CARDS < 2, reason="needs two NVIDIA GPUs that reach each other's memory")


@pytest.mark.skipif(not GLOO, reason="needs PyTorch's gloo")
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=two_cards)])
def test_two_processes_exchange(tmp_path, kind):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, str(HERE / "collective_process.py")]
    runs = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "meet"), kind],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        found = [run.communicate(timeout=120) for run in runs]
    finally:
        for run in runs:
            run.kill()
    for run, (_, errors) in zip(runs, found):
        assert run.returncode == 0, errors[-2000:]
    assert [out.strip() for out, _ in found] == ["named right 0", "right 1"]
