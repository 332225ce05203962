"""The link by hand: what each kernel moves is counted, what it says is right, and a fault in it is found."""

import numpy as np
import pytest
import torch

import simt
from kernels.collective import link as module
from kernels.collective.group import HERE, PeerTimeout
from kernels.collective.link import WAYS, Link
from lab import cuda

LOADED, STORED = (f"simt__link_bytes_op_{op}.sum" for op in ("ld", "st"))


def test_a_chain_is_one_ring_and_each_load_goes_over_the_link():
    link = Link(["cpu", "cpu"])
    chains = link.chain(50, 24)
    at, seen = 0, []
    for _ in range(50):
        seen.append(at)
        at = int(chains[1][at])
    assert at == 0 and sorted(seen) == [24 * n for n in range(50)]
    for device, bytes_each in ((0, 0), (1, 32)):
        report = link.chase(chains, device, 37)[0]
        assert int(link.out[0]) == seen[37] and report.counters[LOADED] == 37 * bytes_each


@pytest.mark.parametrize("way", WAYS)
def test_every_number_comes_whoever_is_ahead(way):
    link = Link(["cpu", "cpu"], races=way == "data_and_flag")
    for turns in ("forward", "reverse", 3, 4):
        link.devices.turns = turns
        reports = link.flag(way, 6)
        assert [int(out) for out in link.out] == [6, 6]
        assert [r.counters[STORED] for r in reports] == [6 * 32 * (1 + (way == "data_and_flag"))] * 2
        assert [r.counters[LOADED] for r in reports] == [0, 0]  # each waits at its own memory


def test_many_threads_touch_every_word_once():
    link = Link(["cpu", "cpu"])
    words = link.devices.zeros(4 * 302, torch.int32)
    for n, tensor in enumerate(words):
        tensor.copy_(torch.from_numpy(np.random.default_rng(n).integers(-(1 << 31), 1 << 31, tensor.numel(), np.int32)))
    wanted = [int(np.bitwise_xor.reduce(tensor.numpy())) for tensor in words[::-1]]
    reports = link.stream("load_words", words, 3, both=True, threads=32)
    assert [int(out) for out in link.out] == wanted
    assert [r.counters[LOADED] for r in reports] == [302 * 16, 302 * 16]
    before = words[0].clone()
    report = link.stream("store_words", words, 2, threads=64, seed=9)[0]
    assert torch.equal(words[0], before) and report.counters[STORED] == 302 * 16
    assert torch.equal(words[1].view(-1, 4)[:, 0], torch.arange(302, dtype=torch.int32))
    assert (words[1].view(-1, 4)[:, 1:] == 9).all()


def test_a_flag_without_release_and_a_narrow_one_are_found():
    source = (HERE / "link.cu").read_text()
    for old, new, error in (
        ("store_release_system((unsigned *)(to + 1), n);\n    }\n    static __device__ bool come(const uint4 *at, "
         "unsigned n) { return Released", "store_relaxed_system((unsigned *)(to + 1), n);\n    }\n    static "
         "__device__ bool come(const uint4 *at, unsigned n) { return Released", simt.RaceError),
        ('st.relaxed.sys.global.u32 [%0], %1;"', 'st.relaxed.gpu.global.u32 [%0], %1;"', simt.ScopeFault),
    ):  # fmt: skip
        assert source.count(old) == 1
        link = Link(["cpu", "cpu"], races=True)
        link.kernels = cuda.compile(source.replace(old, new), ("-DDEVICES=2", f"-I{HERE}"), "link.cu")
        with pytest.raises(error):
            link.flag("flag_relaxed" if error is simt.ScopeFault else "data_and_flag", 4)


def test_a_peer_that_never_comes_ends_in_a_sentence(monkeypatch):
    link = Link(["cpu", "cpu"])
    link.limit, launch = 30, link.devices.launch
    monkeypatch.setattr(link.devices, "launch", lambda runs: launch([runs[0], None]))
    with pytest.raises(PeerTimeout, match="device 1 did not answer within 30 looks"):
        link.flag("flag_word", 2)


def test_two_devices_and_two_cards_are_asked_for(monkeypatch):
    with pytest.raises(ValueError, match="where must be two devices, got 3"):
        Link(["cpu"] * 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="needs two cards that reach each other's memory"):
        module.main()


def test_no_kernel_spills_on_a_card():
    for kernel in Link(["cpu", "cpu"]).kernels.resources("sm_90a").values():
        assert kernel["registers"] <= 32 and kernel["spill_stores"] == kernel["spill_loads"] == kernel["stack"] == 0
