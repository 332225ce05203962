"""The bench of SSD, on a made-up card: what is timed was right, before and after, and the peer is called right."""

import functools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_attention_bench import card as card
from test_ssd_five import recurrence

from kernels.bench import GPU_TOPICS
from kernels.ssd import bench, by_hand, float32, peers, rungs
from kernels.ssd.bench import Case, Entry, Shape
from kernels.ssd.five import SOURCES, five, least, work

HERE = torch.cuda.is_available() and torch.version.cuda is not None
SMALL = Shape(nheads=2, headdim=16, dstate=16)
TINY = Case("tiny", 40, SMALL, slow=True)


@pytest.fixture
def small(card, monkeypatch):
    """The made-up card, a small layer, one rung and no peer."""
    monkeypatch.setattr(bench, "HOSTILE", [(37, 2, 2, 16, 1, 16)])
    monkeypatch.setattr(bench, "Shape", lambda: SMALL)
    monkeypatch.setattr(bench, "RUNGS", [Entry("five", functools.partial(five, chunk_size=16), SOURCES)])
    monkeypatch.setattr(bench, "copies", lambda call, total=None: [call, dict(call)])
    monkeypatch.setattr(peers, "_module", lambda: None)
    bench.checked.cache_clear()
    return card


@pytest.mark.skipif(HERE, reason="there is a GPU")
def test_without_a_gpu_they_say_so():
    with pytest.raises(RuntimeError, match="the SSD ladders needs? an NVIDIA GPU"):
        bench.ladders()
    assert "ssd" in GPU_TOPICS


def test_truth_is_the_recurrence(card):
    for slow, sequences, extra in ((False, 1, ()), (True, 1, ("z",)), (True, 9, ("initial_states", "z"))):
        call = bench.inputs(100, 2, 4, 8, 2, 16, slow=slow, sequences=sequences, extra=extra)
        assert ("seq_idx" in call) == (sequences > 1) and {"z", "initial_states"} & set(call) == set(extra)
        wanted, _ = recurrence(**call)
        np.testing.assert_allclose(bench.truth(call, 32).numpy(), wanted.numpy(), rtol=1e-9, atol=1e-9)


def test_truth_of_some_heads(card):
    call = bench.inputs(70, 2, 6, 8, 3, 16)
    whole = bench.truth(call, 32)
    for heads in (slice(0, None, 4), slice(5, 6)):
        np.testing.assert_allclose(bench.truth(call, 32, heads).numpy(), whole[:, :, heads].numpy(), 1e-12, 1e-12)


def test_inputs_decay_as_they_say(card):
    call = bench.inputs(10, nheads=400, headdim=1, dstate=1)
    steps = torch.nn.functional.softplus(call["dt_bias"])
    assert (
        1e-3 * 0.99 < steps.min() < 2e-3
        and 0.05 < steps.max() < 0.101
        and -16 < call["A"].min() < -15 < call["A"].max()
    )
    assert -0.1 <= bench.inputs(1, nheads=400, slow=True)["A"].min() < bench.inputs(1, slow=True)["A"].max() <= -0.01


def test_copies_are_cold(card, monkeypatch):
    monkeypatch.setattr(bench.cuda_timing, "COLD", 3 * 2 * 20 * 2 * 8)
    found = bench.copies(bench.inputs(20, 1, 2, 8, 1, 8, extra=("z",)))
    assert len(found) == 3 and all(len({each[name].data_ptr() for each in found}) == 3 for name in "xz")
    assert all(torch.equal(each["B"], found[0]["B"]) for each in found)


def test_the_ladder_of_prefill(small):
    ladder = bench.prefill(TINY, 0.1)
    assert ladder.title == "SSD prefill, tiny, 40, slow decay"
    assert [f.name for f in ladder.figures] == ["five"] == small.timed
    moved, flops = least(1, 40, 2, 16, 1, 16)
    assert (ladder["five"].bytes, ladder["five"].flops) == (moved, flops)
    assert ladder["five"].checked == "right on 2 shapes" and ladder["five"].sources == SOURCES


def test_five_has_kernels_of_its_own_for_fp32(small):
    ladder = bench.prefill(TINY._replace(dtype=torch.float32), 0.1)
    assert ladder["five"].sources == (*SOURCES, *float32.SOURCES)


def test_bf16_is_held_to_bf16(small, monkeypatch):
    monkeypatch.setitem(bench.TOLERANCE, torch.bfloat16, 1e-9)
    with pytest.raises(ValueError, match="five is not right, so it is not timed: .* allowed are 1e-09"):
        bench.prefill(TINY._replace(dtype=torch.bfloat16), 0.1)


def test_a_rung_that_is_wrong_is_not_timed(small, monkeypatch):
    def forgetful(x, dt, A, B, C, *, out=None, **options):
        y = five(x, dt, A, B, C, chunk_size=16, **options)
        if x.shape[1] == 40:  # lucky on the hostile shape
            y[:, 32:] = 0
        return y if out is None else out.copy_(y)

    monkeypatch.setattr(bench, "RUNGS", [Entry("forgetful", forgetful, SOURCES)])
    with pytest.raises(ValueError, match="forgetful is not right, so it is not timed"):
        bench.prefill(TINY, 0.1)
    monkeypatch.setattr(bench, "HOSTILE", [(40, 1, 2, 16, 1, 16)])
    bench.checked.cache_clear()
    assert not bench.checked(forgetful) and small.timed == []


def test_the_longest_sequence_is_looked_at_in_some_heads(small, monkeypatch):
    monkeypatch.setattr(bench, "LONGEST", 40)
    monkeypatch.setattr(bench, "SAMPLE", slice(1, None, 2))
    monkeypatch.setattr(bench, "_warm", lambda case: bench.inputs(case.seqlen, *SMALL))
    ladder = bench.longest(0.1)
    assert ladder.title == "SSD prefill, 2.7B, 40" and ladder["five"].checked == "right on 2 shapes"

    def forgetful(x, *rest, out=None, **options):
        y = five(x, *rest, chunk_size=16, **options)
        y[:, 30:, 1] = 0
        return out.copy_(y)

    monkeypatch.setattr(bench, "checked", lambda function: None)
    monkeypatch.setattr(
        bench,
        "RUNGS",
        [Entry("forgetful", lambda **call: forgetful(*[call.pop(n) for n in "x dt A B C".split()], **call), SOURCES)],
    )
    with pytest.raises(ValueError, match="forgetful is not right"):
        bench.longest(0.1)


def test_the_chain_goes_over_heads(small, monkeypatch):
    monkeypatch.setattr(bench, "LONG", 40)
    monkeypatch.setattr(bench, "CHAIN", ((2, 3), (16, 32)))
    monkeypatch.setattr(bench, "inputs", functools.partial(bench.inputs, headdim=16, dstate=16))
    (rung, *_) = rungs.RUNGS
    monkeypatch.setattr(bench, "RUNGS", [Entry(rung.title, rung.function, rung.sources)])
    ladder = bench.chain(0.1)
    assert ladder.title == "published design, 40, by heads"
    assert [f.name for f in ladder.figures] == [f"{h} heads, chunk {q}" for h in (2, 3) for q in (16, 32)]
    assert ladder.figures[0].sources == rung.sources


def test_every_case_has_rungs_and_a_title_of_its_own():
    titles = [case.title for case in bench.CASES]
    assert len(set(titles)) == len(titles) and {f"SSD prefill, 2.7B, {n}" for n in ("1K", "256K")} < set(titles)
    for case in bench.CASES:
        names = [entry.title for entry in bench.RUNGS if entry.timed(case)]
        assert {"five, chunk 128", "five, chunk 256"} <= set(names)
        assert ("fused.cu" in names) == (case.dtype != torch.float32)  # which it leaves to five
        timed = case.dtype != torch.float32 and case.shape.dstate <= 128 and case.sequences == 1
        assert ("loads ahead, dt once" in names) == timed
    rows = {case.title: [entry.title for entry in bench.RUNGS if entry.timed(case)] for case in bench.CASES}
    assert rows["SSD prefill, 2.7B, 64K"] == [entry.title for entry in bench.RUNGS]
    assert "published design" in rows["SSD prefill, 2.7B, 64K, slow decay"]
    assert "five, 16-bit states" not in rows["SSD prefill, bf16, 16K"]  # which are of fp16
    assert {case.shape.batch for case in bench.CASES} == {1, 8}


def test_the_ladder_of_steps(small, monkeypatch):
    monkeypatch.setattr(bench, "inputs", functools.partial(bench.inputs, **SMALL._asdict()))
    ladder = bench.steps(40, 16, 0.1)
    assert ladder.title == "SSD steps, 2.7B, 40, chunk 16"
    predicted = work(1, 40, 2, 16, 1, 16, 16)
    assert {f.name: (f.bytes, f.flops) for f in ladder.figures} == predicted


def test_the_rungs_by_hand_stand_beside_each_other(small, monkeypatch):
    shape, draw = Shape(nheads=2, dstate=64), bench.inputs
    monkeypatch.setattr(bench, "HOSTILE", [(70, 1, 2, 64, 1, 64)])
    monkeypatch.setattr(bench, "Shape", lambda: shape)
    monkeypatch.setattr(bench, "inputs", lambda seqlen, *sizes: draw(seqlen, *(sizes or shape)))
    monkeypatch.setattr(by_hand, "RUNGS", [by_hand.RUNGS[0], by_hand.RUNGS[3]])  # the others are called alike
    ladder = bench.climb(80, 0.1)
    assert ladder.title == "SSD by hand, 2.7B, 80"
    assert [f.name for f in ladder.figures] == [rung.title for rung in by_hand.RUNGS]
    assert {f.checked for f in ladder.figures} == {"right on 2 shapes"}
    assert set(bench.FUSED) < set(ladder.figures[-1].sources)


# The peer


def test_mamba_ssm_that_is_not_installed_is_named_once(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    peers._module.cache_clear()
    assert peers.mamba() is None and peers.mamba() is None
    assert capsys.readouterr().out.count("mamba_ssm cannot be imported (") == 1
    peers._module.cache_clear()


def test_mamba_ssm_is_imported_without_its_extension(monkeypatch, tmp_path):
    """Its __init__ fails where the extension is not built; the module with the kernels does not need it."""
    home = tmp_path / "mamba_ssm" / "ops" / "triton"
    home.mkdir(parents=True)
    for folder in (home, home.parent):
        (folder / "__init__.py").touch()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import selective_scan_cuda_that_is_not_there")
    (home / "ssd_combined.py").write_text(
        "from mamba_ssm.ops.triton.ssd_bmm import kernel\nmamba_chunk_scan_combined = 7\n"
    )
    (home / "ssd_bmm.py").write_text(
        "from types import SimpleNamespace\n"
        "kernel = _bmm_chunk_fwd_kernel = SimpleNamespace(configs=[1, 2], cache={3: 4})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    peers._module.cache_clear()
    try:
        assert peers.mamba() == 7
        assert {name for name, _ in peers._tuned()} == {"kernel", "_bmm_chunk_fwd_kernel"}
        peers.tune_anew()
        assert sys.modules["mamba_ssm.ops.triton.ssd_bmm"].kernel.cache == {}
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
        peers._module.cache_clear()


def test_the_published_kernel_is_called_as_its_fork_does(monkeypatch):
    seen = []
    monkeypatch.setattr(peers, "published", lambda: lambda **call: seen.append(call) or ("y", "states"))
    (call,) = peers.published_calls([{"x": 1, "dt_softplus": True}], "medium", 256)
    wide = {name: False for name in peers.WIDE} | {"cb_comp_fp32": True}
    assert call() == "y" and seen == [{"x": 1, "dt_softplus": True, "chunk_size": 256} | wide]
    peers.published_calls([{}], "high", 128)[0]()
    assert seen[1] == {"chunk_size": 128} | dict.fromkeys(peers.WIDE, True)


def test_where_the_published_kernel_is_to_be_had_is_said(monkeypatch, capsys):
    monkeypatch.setattr(peers, "_module", lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_fused5", None)
    peers.published.cache_clear()
    assert peers.published() is None and peers.published() is None
    said = capsys.readouterr().out
    assert said.count("the published fused kernel cannot be imported") == 1 and "github.com/RishiAstra/mamba" in said
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_fused5", SimpleNamespace(_fused5_ssd=7))
    peers.published.cache_clear()
    assert peers.published() == 7
    peers.published.cache_clear()


def test_the_peers_stand_in_the_ladder(small, monkeypatch, capsys):
    """Tuned anew, at their best chunk; what failed in a process of its own is not called here."""
    tuned = []

    def right(chunk_size=16, out=None, **call):
        y = bench.truth(call, chunk_size).to(call["x"].dtype)
        return y if out is None else out.copy_(y)

    def published(inputs, precision, chunk_size):
        assert chunk_size == 128, "it was refused"
        return [functools.partial(lambda each: right(**each) * 1.01, each) for each in inputs]

    monkeypatch.setattr(bench, "RUNGS", [Entry("five", right, SOURCES)])
    monkeypatch.setattr(peers, "mamba", lambda: right)
    monkeypatch.setattr(peers, "published", lambda: right)
    monkeypatch.setattr(peers, "published_calls", published)
    monkeypatch.setattr(peers, "tune_anew", lambda: tuned.append(1))
    monkeypatch.setattr(bench, "_refused", set())
    monkeypatch.setattr(bench, "CASES", [TINY])
    monkeypatch.setattr(bench, "_apart", lambda *job, seconds: "no card is left" if job[2] else None)
    for number in (0, 1):
        bench._try(TINY, number)
    assert "medium, chunk 256 is left out: no card is left" in capsys.readouterr().out
    ladder = bench.prefill(TINY, 0.1)
    assert [f.name for f in ladder.figures] == [
        "five",
        "mamba_ssm: chunk 64",
        "published fused kernel: medium, chunk 128",
    ]
    assert [f.checked for f in ladder.figures[1:]] == ["right on 1 shape", "off by 1.0e-02"] and tuned == [1]


def test_what_fails_in_a_process_of_its_own_says_why(monkeypatch):
    def run(command, **how):
        if command[-1] == "slow":
            raise bench.subprocess.TimeoutExpired(command, how["timeout"])
        return SimpleNamespace(returncode=int(command[-1] != "good"), stderr="a\nError: b\n" * (command[-1] == "bad"))

    monkeypatch.setattr(bench.subprocess, "run", run)
    assert bench._apart("good") is None and bench._apart("bad") == "Error: b"
    assert bench._apart("mute") == "exit status 1" and bench._apart("slow", seconds=7) == "no result within 7 seconds"


def test_bf16_and_fp32_get_the_precision_that_takes_them():
    found = {case.dtype: {precision for precision, _ in bench._ways(case)} for case in bench.CASES}
    assert found == {torch.float16: {"medium"}, torch.bfloat16: {"high"}, torch.float32: {"high"}}
    assert all(len(bench._ways(case)) == 2 for case in bench.CASES)


def test_all_is_compiled_ahead(card, monkeypatch):
    asked, here = [], []
    monkeypatch.setattr(bench, "_apart", lambda *job: asked.append(job))
    monkeypatch.setattr(bench, "_compile_rung", lambda *job: here.append(job))
    monkeypatch.setattr(peers, "_module", lambda: SimpleNamespace(mamba_chunk_scan_combined=print))
    monkeypatch.setattr(peers, "published", lambda: print)
    tried = []
    monkeypatch.setattr(bench, "_try", lambda *job: tried.append(job))
    bench.compile_ahead()
    assert sorted(tried, key=str) == sorted([(case, n) for case in bench.CASES for n in (0, 1)], key=str)
    assert len(asked) == len(set(asked)) and here == [(len(bench.RUNGS) - 1, bench.CASES)]
    assert {job[1] for job in asked if job[0] == "rung"} == set(range(len(bench.RUNGS) - 1))
    cases = [bench.CASES[n] for kind, n, *_ in asked if kind == "peer"]
    assert len(cases) == len(set(cases)) * (len(peers.PARTS) + 1)
    assert {case.dtype for case in cases} == {torch.float16, torch.bfloat16, torch.float32}
    assert {case.shape.dstate for case in cases} == {16, 64, 128, 256} and any(case.seqlen % 16 for case in cases)
    assert {job[1] for job in asked if job[0] == "chain"} == set(bench.CHAIN[0])


def test_a_job_compiles_one_rung(small, monkeypatch):
    seen = []
    entry = Entry("a", lambda **call: seen.append((call["x"].shape, call["x"].dtype)), (), lengths=(40,))
    cases = [TINY, TINY._replace(seqlen=50), TINY._replace(seqlen=40, dtype=torch.bfloat16), TINY._replace(seqlen=99)]
    monkeypatch.setattr(bench, "RUNGS", [entry])
    monkeypatch.setattr(bench, "CASES", cases)
    bench._compile("rung", 0, 0, 1, 2)
    tiny = (1, 40, 2, 16)
    hostile = ((2, 37, 2, 16), torch.float16)
    assert seen == [(tiny, torch.float16), (tiny, torch.bfloat16), hostile]


def test_a_job_compiles_a_part_of_mamba_ssm(monkeypatch):
    kernels = {name: SimpleNamespace(configs=[1, 2, 3], cache={}) for name in (*peers.PARTS, "_state_passing")}
    monkeypatch.setattr(peers, "_tuned", lambda: kernels.items())
    monkeypatch.setattr(peers, "_module", lambda: SimpleNamespace(mamba_chunk_scan_combined=lambda **call: None))
    peers.compile_part({"x": 1}, 64, 1)
    assert [len(kernel.configs) for kernel in kernels.values()] == [1, 3, 1, 1]


def test_mamba_ssm_gets_our_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(
        peers, "_module", lambda: SimpleNamespace(mamba_chunk_scan_combined=lambda **call: seen.append(call))
    )
    (call,) = peers.calls([{"x": 1, "dt_softplus": True}], 128)
    call()
    assert seen == [{"x": 1, "dt_softplus": True, "chunk_size": 128}]


def test_a_peer_is_not_called_where_its_offsets_overflow(capsys):
    """Of the 2.7B layer: 2**31 / (80 * 64 * 128) chunks are 3,276."""
    assert peers.within_32_bits(3276 * 64, 80, 64, 128, 64) and peers.within_32_bits(1 << 18, 80, 64, 128, 128)
    assert capsys.readouterr().out == ""
    assert not peers.within_32_bits(3276 * 64 + 1, 80, 64, 128, 64)
    assert "in chunks of 64 are left out" in capsys.readouterr().out
