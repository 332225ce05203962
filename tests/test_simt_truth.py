"""The stored hardware counters are whole, and the GPU's outputs are those that NumPy expects."""

import json
from pathlib import Path

import numpy as np
import pytest
from simt_truth.measure import LAUNCHES, METRICS, checksum, counters

STORED = json.loads((Path(__file__).parent / "simt_truth" / "h200.json").read_text())
BY_NAME = {launch.name: launch for launch in LAUNCHES}


def test_every_launch_has_a_name_of_its_own_and_was_measured():
    assert len(BY_NAME) == len(LAUNCHES) >= 60
    assert set(BY_NAME) == set(STORED["launches"]) and STORED["card"] == "NVIDIA H200"


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_gpu_gave_what_numpy_expects(name):
    launch, stored = BY_NAME[name], STORED["launches"][name]
    wanted = launch.expected(*launch.args)
    wanted = [np.asarray(w, launch.args[i].dtype) for w, i in zip(wanted, launch.outputs, strict=True)]
    if launch.exact:
        assert checksum(wanted) == stored["crc32"]
    assert set(stored["counters"]) == set(METRICS) and all(v >= 0 for v in stored["counters"].values())
    assert stored["counters"]["smsp__inst_executed.sum"] > 0


def test_ncus_table_is_read_in_launch_order():
    text = 'noise\n"ID","Kernel Name","Metric Name","Metric Value"\n'
    text += '"0","a","x","1,024"\n"0","a","y","2"\n"1","b","x","3"\n'
    assert counters(text) == [("a", {"x": 1024.0, "y": 2.0}), ("b", {"x": 3.0})]
