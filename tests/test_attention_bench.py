"""The benches of attention and of the quantised cache, on a made-up card: what is timed was right, before and after."""

import functools
import sys
from dataclasses import replace
from types import SimpleNamespace

import made_up_card
import numpy as np
import pytest
import torch

import ref.attention
from kernels import benching, kv_cache, running
from kernels.attention import bench, mix, mix_answers, peers, rungs
from kernels.bench import GPU_TOPICS
from kernels.kv_cache import bench as kv_bench
from kernels.kv_cache import rungs as kv_rungs
from lab import Ladder, Roof, Rung, Timing, as_called, cuda_timing, plots, results
from lab.figure import Figure
from lab.source import with_includes

HERE = torch.cuda.is_available() and torch.version.cuda is not None


@pytest.fixture
def card(monkeypatch):
    """A card that is this CPU, and small tensors."""
    made = made_up_card.put_in(monkeypatch)
    small = {"DEVICE": "cpu", "N_HEADS": 4, "N_KV_HEADS": 2, "HEAD_DIM": 64, "HOSTILE": [(2, 4, 2, 37, 64)]}
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(benching, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "SLOW", 1e3)
    monkeypatch.setattr(peers, "sixteen_bit", lambda q, caches: [])
    bench.checked.cache_clear()
    return made


def only(monkeypatch, *names):
    monkeypatch.setattr(rungs, "RUNGS", [rung for rung in rungs.RUNGS if rung.name in names])


def sources_are_there(ladder):
    """Whether all are files of the course; what they include is added when they are stored."""
    return all((results.ROOT / source).is_file() for figure in ladder.figures for source in figure.sources)


# The ladders


@pytest.mark.skipif(HERE, reason="there is a GPU")
def test_without_a_gpu_they_say_so():
    with pytest.raises(RuntimeError, match="the attention ladders needs? an NVIDIA GPU"):
        bench.ladders()
    assert {"attention", "kv_cache"} <= set(GPU_TOPICS)


def test_the_ladder_of_decode_attention(card, monkeypatch, capsys, tmp_path):
    only(monkeypatch, "online", "split")
    monkeypatch.setattr(bench, "FLEX_CELLS", [])
    sdpa = functools.partial(peers._sdpa, torch.nn.attention.SDPBackend.MATH)
    monkeypatch.setattr(
        peers, "sixteen_bit", lambda q, caches: [("SDPA", {"m": lambda: [lambda: sdpa(q, *caches[0])]})]
    )
    ladder = bench._decode("bf16", 2, 40, 0.1)
    ours = [rung.title for rung in rungs.RUNGS] + ["decode", "decode, PDL"]
    assert [f.name for f in ladder.figures] == [*ours, "SDPA: m", "reading the cache only"] == card.timed
    assert ladder.title == "decode bf16, batch 2, 40" and ladder.device == "cuda"
    moved = 2 * (2 * 2 * 40 * 2 * 64 + 2 * 2 * 4 * 64)  # k and v; q and out; 2 bytes each
    assert {f.bytes for f in ladder.figures} == {moved} and {f.flops for f in ladder.figures} == {4 * 2 * 40 * 4 * 64}
    for figure in ladder.figures[:4]:
        assert figure.checked == "right on 2 shapes" and figure.sources
    assert [f.checked for f in ladder.figures[4:]] == ["right on 1 shape", "not checked"]
    assert ladder["SDPA: m"].sources == () and sources_are_there(ladder) and ladder.calls == {}
    assert "decode bf16, batch 2, 40: 6 rows in" in capsys.readouterr().out
    path = results.save(tmp_path, [ladder], Roof("a card", 4e12, 4e12, 7e14), {})
    stored = [replace(figure, sources=with_includes(*figure.sources)) for figure in ladder.figures]
    assert results.Stored(path).ladders[0].figures == stored


def test_the_ladder_of_another_model(card, monkeypatch):
    sdpa = functools.partial(peers._sdpa, torch.nn.attention.SDPBackend.MATH)
    monkeypatch.setattr(
        peers, "sixteen_bit", lambda q, caches: [("SDPA", {"m": lambda: [lambda: sdpa(q, *caches[0])]})]
    )
    ladder = bench._other(2, 40, 6, 2, 32, "Tiny", 0.1)
    assert ladder.title == "decode bf16, Tiny: 6/2 heads of 32, batch 2, 40"
    assert [f.name for f in ladder.figures] == ["decode", "decode, PDL", "SDPA: m", "reading the cache only"]
    assert {f.bytes for f in ladder.figures} == {2 * (2 * 2 * 40 * 2 * 32 + 2 * 2 * 6 * 32)}
    assert [f.checked for f in ladder.figures[:2]] == 2 * ["right on 2 shapes"] and sources_are_there(ladder)


def test_the_ladder_of_the_mix(card):
    for name in ("fp32", "fp16"):
        ladder = bench._mix(name, 40, 0.1)
        assert ladder.title == f"attention mix {name}, 4 heads, 2 KV heads, 40 tokens"
        names = [rung.title for rung in (*mix.RUNGS, *mix_answers.RUNGS)]
        peer = "torch.matmul: a product for each KV head"
        assert [f.name for f in ladder.figures] == [*names, peer, "reading the cache only"]
        size = 4 if name == "fp32" else 2
        assert {f.bytes for f in ladder.figures} == {size * (4 * 40 + 40 * 2 * 64 + 4 * 64)}
        assert sources_are_there(ladder)


def test_the_ladder_of_splits(card):
    ladder = bench._splits(96, (1, 3), 0.1)
    assert ladder.title == "splits at 96"
    assert [f.name for f in ladder.figures] == ["1 split", "3 splits", "reading the cache only"]


def test_titles_differ():
    titles = [f"{batch} {bench.short(kv_len)}" for batch, kv_len in bench.CELLS]
    assert len(set(titles)) == len(titles) and "1 1M" in titles and "16 128K" in titles
    assert len({shape[:5] for shape in bench.OTHERS}) == len(bench.OTHERS)


# What is wrong is not timed


def broken(q, k, v, *, out=None, splits=None):
    """Drops the newest token."""
    return rungs.online(q, k[:, :-1].contiguous(), v[:, :-1].contiguous(), out=out)


def test_a_rung_that_is_wrong_is_not_timed(card, monkeypatch):
    monkeypatch.setattr(rungs, "RUNGS", [Rung("broken", "drops a token", broken, ("lab/check.py",))])
    with pytest.raises(ValueError, match="decode fp16, batch 1, 40: drops a token is not right, .* relative error"):
        bench._decode("fp16", 1, 40, 0.1)
    assert card.timed == []


def test_a_rung_that_is_wrong_on_a_hostile_shape_is_not_timed(card, monkeypatch):
    def lucky(q, k, v, *, out=None):
        return (broken if k.shape[1] == 37 else rungs.online)(q, k, v, out=out)

    monkeypatch.setattr(rungs, "RUNGS", [Rung("lucky", "lucky", lucky, ("lab/check.py",))])
    with pytest.raises(ValueError, match="lucky is not right.*wrong at shape 2 × 4 × 2 × 37 × 64"):
        bench._decode("fp16", 1, 40, 0.1)
    assert card.timed == []


def row(wanted, got, **facts):
    out = torch.zeros_like(wanted)
    facts = {"outs": [out], "sources": ("lab/check.py",)} | facts
    return benching.Row("a", [lambda: out.copy_(got())], wanted, 1e-3, bytes=8, flops=8, **facts)


def test_results_are_looked_at_again_after_timing(card):
    wanted, calls = torch.randn(4, dtype=torch.float64), []

    def tired():
        calls.append(1)
        return wanted * (1 if len(calls) == 1 else 1.01)

    with pytest.raises(ValueError, match="a is not right"):
        benching.ladder_of("title", [row(wanted, tired)], 0.1)
    assert card.timed == card.called == ["a"] and len(calls) == 4  # in a graph, as called, and through which files


def test_a_call_that_writes_nothing_is_seen(card):
    wanted = torch.randn(4, dtype=torch.float64)
    lazy = benching.Row("lazy", [lambda: wanted], wanted, 1e-3, 8, 8, outs=[torch.zeros(4)], sources=("lab/check.py",))
    with pytest.raises(ValueError, match="lazy is not right.*nan"):
        benching.ladder_of("title", [lazy], 0.1)


def test_the_error_is_the_worst_of_all_calls(card):
    wanted = torch.tensor([3.0, 4.0], dtype=torch.float64)
    both = benching.Row("a", [lambda: wanted, lambda: wanted + torch.tensor([0, 0.005])], wanted, 2e-3)
    assert benching._error("title", both) == pytest.approx(1e-3)
    both.tolerance = 5e-4
    with pytest.raises(ValueError, match="title: a is not right.*0.001, allowed are 0.0005"):
        benching._error("title", both)


# What is left out


def test_a_slow_rung_is_left_out_with_a_sentence(card, monkeypatch, capsys):
    only(monkeypatch, "online")
    monkeypatch.setattr(bench, "SLOW", 0.0)
    ladder = bench._decode("fp16", 1, 40, 0.1)
    assert [f.name for f in ladder.figures] == ["decode", "decode, PDL", "reading the cache only"]
    assert "decode fp16, batch 1, 40: online softmax takes" in capsys.readouterr().out


def test_of_a_peer_the_fastest_mode_counts(monkeypatch, capsys):
    def refuse():
        raise RuntimeError("no such card\nand more")

    monkeypatch.setattr(cuda_timing, "Graph", lambda calls: SimpleNamespace(turn=lambda: calls))
    called = {"A: slow": 3.0, "A: fast": 2.0, "A: later": 1.95}
    monkeypatch.setattr(as_called, "together", lambda calls, **_: {name: Timing.of([called[name]]) for name in calls})
    modes = {"slow": lambda: [3.0], "fast": lambda: [1.0, 2.0, 9.0], "later": lambda: [2.5], "none": refuse}
    families = [("A", modes), ("B", {"x": refuse})]
    (found,) = benching.peer_rows(families, 0.1, bytes=3)  # another is as fast as called, but for noise
    assert (found.title, found.calls, found.tolerance, found.bytes) == ("A: fast", [1.0, 2.0, 9.0], 0.1, 3)
    assert capsys.readouterr().out == "A: none is left out: no such card\nB: x is left out: no such card\n"
    called["A: later"] = 1.5
    assert [row.title for row in benching.peer_rows(families, 0.1, bytes=3)] == ["A: fast", "A: later"]


def test_what_compiles_is_called_ahead(card, capsys):
    called = []

    def fails():
        raise ValueError("told of where it is timed")

    benching.ahead([functools.partial(called.append, n) for n in range(20)] + [fails])
    assert sorted(called) == list(range(20)) and "21 calls ahead" in (said := capsys.readouterr().out)
    assert "1 of them in vain" in said
    calls = bench.hostile_calls(
        [lambda *found: called.append([t.shape for t in found])], bench.mix_arrays, [torch.float16]
    )
    called.clear()
    benching.ahead(calls)
    assert called == [[(4, 37), (37, 2, 64)]] and "vain" not in capsys.readouterr().out


def test_a_run_that_only_calls_takes_the_modes_that_are_stored(card, monkeypatch):
    monkeypatch.setattr(cuda_timing, "Graph", lambda calls: pytest.fail("a graph was captured"))
    wanted, made = torch.tensor([3.0, 4.0], dtype=torch.float64), []

    def figure(name, *sources):
        timing = Timing(1.0, 1.0, 1.0, 1)
        return Figure(name, 8, 8, timing, 0.5, "read", sources=sources, called=timing, sustained=timing)

    def make(name):
        return lambda: made.append(name) or [lambda: wanted]

    stored = Ladder("title", "read", [figure("ours", "lab/check.py"), figure("A: one")], device="cuda")
    kept = []
    with running.set_to(running.Run(called=True, stored={"title": stored}, store=kept.append)):
        rows = [
            benching.Row(name, [lambda: wanted], wanted, 1e-3, sources=("lab/check.py",)) for name in ("ours", "new")
        ]
        modes = {name: make(name) for name in ("one", "two")}
        facts = {"wanted": wanted, "bytes": 8, "flops": 8}
        rows += benching.peer_rows([("A", modes), ("B", modes)], 1e-3, ladder="title", **facts)
        found = benching.ladder_of("title", rows, 0.1)
    assert made == ["one"] and card.timed == [] and kept == [found]
    assert [f.name for f in found.figures] == ["ours", "A: one"]
    for figure in found.figures:
        assert (figure.called.median, figure.host.median) == (2e-5, 5e-6)
        assert figure.timing == figure.sustained == Timing(1.0, 1.0, 1.0, 1)  # as it was
    assert "lab/check.py" in found.called_on.sources


def test_a_peer_that_is_wrong_is_left_out_with_a_sentence(card, monkeypatch, capsys):
    wanted = torch.tensor([3.0, 4.0], dtype=torch.float64)
    facts = {"wanted": wanted, "bytes": 8, "flops": 8}
    modes = {"wrong": lambda: [lambda: wanted + 1], "right": lambda: [lambda: wanted]}
    (found,) = benching.peer_rows([("A", modes)], 1e-3, **facts)
    assert found.title == "A: right"
    said = capsys.readouterr().out
    assert "A: wrong is left out: A: A: wrong is not right" in said
    calls = []

    def tires():  # right before, wrong after it was timed
        calls.append(1)
        return wanted * (1 if len(calls) <= 2 else 2)

    rows = [benching.Row("ours", [lambda: wanted], sources=("lab/check.py",), tolerance=1e-3, **facts)]
    rows += [benching.Row("at once", [lambda: -wanted], tolerance=1e-3, **facts), found]
    rows += [benching.Row("later", [tires], tolerance=1e-3, **facts)]
    ladder = benching.ladder_of("title", rows, 0.1, sustain=("ours",))
    assert [f.name for f in ladder.figures] == ["ours", "A: right"] and card.timed == ["ours", "A: right", "later"]
    said = capsys.readouterr().out
    assert all(f"title: {name} is not right" in said for name in ("at once", "later")) and "it is left out" in said
    assert ladder["ours"].sustained.median == ladder["A: right"].sustained.median == 1.1e-5


def test_a_peer_that_is_not_installed_is_named_once(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    peers._flashinfer.cache_clear()
    q, k = torch.randn(1, 4, 64), torch.randn(1, 64, 2, 64)
    assert [name for name, _ in peers.sixteen_bit(q, [(k, k)])] == ["SDPA flash", "SDPA cuDNN"]
    assert list(peers.eight_bit(q, [(k, k)])) == []
    assert capsys.readouterr().out.count("FlashInfer cannot be imported (") == 1
    peers._flashinfer.cache_clear()


class FakeFlashInfer:
    """Attention in pages as FlashInfer means it: a sequence's keys are where its page table says."""

    def __init__(self):
        self.decode, self.seen = self, []

    def BatchDecodeWithPagedKVCacheWrapper(self, workspace, layout, *, use_tensor_cores, backend):
        assert workspace.dtype == torch.uint8 and layout == "NHD" and backend in ("auto", "fa3")
        name = f"batch {use_tensor_cores}" + (" fa3" if backend == "fa3" else "")

        def plan(indptr, indices, last, n_heads, n_kv_heads, head_dim, page, *, q_data_type, kv_data_type):
            found.update(indptr=indptr.tolist(), indices=indices, last=last, heads=n_heads, page=page)
            assert indptr.device.type == last.device.type == "cpu" and indptr.dtype == indices.dtype == torch.int32

        def run(q, cache, *, enable_pdl):
            self.seen.append((name, enable_pdl))
            assert (found["last"] == found["page"]).all() and found["heads"] == q.shape[1]
            tables = [found["indices"][a:b] for a, b in zip(found["indptr"], found["indptr"][1:])]
            return self.through(q, cache, torch.stack(tables))

        found = {}
        return SimpleNamespace(plan=plan, run=run)

    def BatchAttention(self, *, kv_layout, device):
        def plan(queries, ends, indices, lengths, n_heads, n_kv_heads, head_dim, of_values, page, *, q_data_type,
                 kv_data_type):  # fmt: skip
            assert queries.tolist() == list(range(len(lengths) + 1)) and n_heads % n_kv_heads == 0
            assert head_dim == of_values and (lengths == page * (ends[1:] - ends[:-1])).all()
            found.update(table=indices.view(len(lengths), -1))

        def run(q, cache):
            self.seen.append(("BatchAttention", False))
            return self.through(q, cache, found["table"]), "logarithms"

        found = {}
        assert kv_layout == "NHD" and device == "cpu"
        return SimpleNamespace(plan=plan, run=run)

    def xqa_batch_decode_with_kv_cache(self, q, cache, workspace, table, lengths, longest, scale, one, *, enable_pdl):
        self.seen.append(("XQA", enable_pdl))
        assert (
            workspace.count_nonzero() == 0 and lengths.dtype == torch.uint32 and lengths.tolist() == [longest] * len(q)
        )
        assert (scale, one) == (q.shape[2] ** -0.5, 1.0)
        return self.through(q, cache, table)

    def single_decode_with_kv_cache(self, q, k, v, *, use_tensor_cores):
        self.seen.append((f"single {use_tensor_cores}", False))
        return bench.truth(q[None], k[None], v[None])[0]

    @staticmethod
    def through(q, cache, table):
        return bench.truth(q, *(pages[table.long()].flatten(1, 2) for pages in cache))


def test_flashinfer_is_called_right(monkeypatch, capsys):
    fake = FakeFlashInfer()
    monkeypatch.setattr(peers, "_flashinfer", lambda: fake)
    monkeypatch.setattr(peers, "WORKSPACE", 64)
    for batch in (1, 16):
        q, k, v = torch.randn(batch, 4, 8), torch.randn(batch, 192, 2, 8), torch.randn(batch, 192, 2, 8)
        wanted, fake.seen = bench.truth(q, k, v), []
        for function in (peers.sixteen_bit, peers.eight_bit):
            for name, modes in function(q, [(k, v)] * 2):
                for mode, make in modes.items() if "FlashInfer" in name else ():
                    first, second = make()
                    assert torch.equal(first().view(wanted.shape), wanted) and torch.equal(first(), second())
                    assert fake.seen[-1][1] is ("PDL" in name) and (mode == "XQA") == (fake.seen[-1][0] == "XQA")
        calls = {"XQA", "batch True", "batch False", "BatchAttention", "batch True fa3" if batch > 1 else "single True"}
        assert {what for what, _ in fake.seen} == calls


def test_pages_are_views():
    k = torch.arange(2 * 128 * 2 * 4.0).view(2, 128, 2, 4)
    ((pages, _),) = peers._pages([(k, k)])
    assert pages.shape == (4, 64, 2, 4) and pages.data_ptr() == k.data_ptr()
    assert torch.equal(pages[3, 5], k[1, 69])


# The truth


def test_truth_is_the_reference():
    q, k, v = torch.randn(2, 6, 8), torch.randn(2, 37, 3, 8), torch.randn(2, 37, 3, 8)
    wanted = ref.attention.decode_attention(*(x.double().numpy() for x in (q, k, v)))
    np.testing.assert_allclose(bench.truth(q, k, v).numpy(), wanted, rtol=1e-12, atol=1e-14)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        small = k.to(dtype)
        assert torch.equal(bench.truth(q, small, v), bench.truth(q, small.double(), v))


def test_the_mix_of_the_peer_is_the_reference():
    att, v = torch.randn(6, 37, dtype=torch.float64), torch.randn(37, 3, 8, dtype=torch.float64)
    wanted = ref.attention.attention_mix(att.numpy(), v.numpy())
    np.testing.assert_allclose(bench.by_matmul(att, v).numpy(), wanted, rtol=1e-12, atol=1e-14)


def test_scaled_dot_product_attention_is_called_right():
    q, k, v = torch.randn(2, 6, 8), torch.randn(2, 37, 3, 8), torch.randn(2, 37, 3, 8)
    got = peers._sdpa(torch.nn.attention.SDPBackend.MATH, q, k, v)
    torch.testing.assert_close(got.view(2, 6, 8).double(), bench.truth(q, k, v), rtol=1e-5, atol=1e-5)


# The picture


def context(**rows):
    """Ladders by context length from {name: shares}; None leaves a row out. Rows in capitals are peers."""
    time, found = Timing.of([1e-5]), {}
    for at, tokens in enumerate((4096, 32768, 1 << 20)):
        figures = [
            Figure(name, 1, 1, time, shares[at], "read", sources=() if name[0].isupper() else ("a.cu",))
            for name, shares in rows.items()
            if shares[at] is not None
        ]
        found[tokens] = Ladder("decode", "read", figures)
    return found


def test_a_line_for_each_row_over_context():
    ladders = context(
        decode=(0.5, 0.9, 0.97), **{"Peer: best mode": (0.3, None, 0.95), "Peer, PDL: x": (0.4, 0.8, 0.9)}
    )
    picture = plots.roof_over_context(ladders, ["decode", "Peer"], "title")
    (axis,) = picture.axes
    roof, ours, peer = axis.lines
    assert axis.get_title("left") == "title" and axis.get_xscale() == "log"
    assert [t.get_text() for t in axis.get_xticklabels()] == ["4K", "32K", "1M"]
    assert list(ours.get_xdata()) == [4096, 32768, 1 << 20] and list(ours.get_ydata()) == [50, 90, 97]
    np.testing.assert_array_equal(peer.get_ydata(), [30, np.nan, 95])  # a gap, and not the row under PDL
    assert (ours.get_linestyle(), peer.get_linestyle()) == ("-", "--") and list(roof.get_ydata()) == [100, 100]
    labels = {t.get_text(): t for t in axis.texts}
    assert set(labels) == {"decode", "Peer"}
    assert labels["decode"].get_color() == ours.get_color() and labels["decode"].xy == (1 << 20, 97)


def test_labels_at_the_ends_of_lines_keep_apart():
    assert plots.ladders._apart([10, 50, 51, 52], 5, 100) == [10, 50, 55, 60]
    assert plots.ladders._apart([10, 97, 98, 99], 5, 100) == [10, 90, 95, 100]
    assert plots.ladders._apart([0, 0, 0], 5, 100) == [0, 5, 10] and plots.ladders._apart([], 5, 100) == []


def test_a_row_that_no_ladder_has_is_named():
    with pytest.raises(KeyError, match="no ladder has a row 'Pee'"):
        plots.roof_over_context(context(Peer=(0.1, 0.2, 0.3)), ["Pee"], "title")


# The quantised cache


def test_the_ladders_of_the_quantised_cache(card, monkeypatch, capsys):
    monkeypatch.setattr(peers, "_flashinfer", lambda: None)
    ladders = list(kv_bench._cell(1, 40, 0.1))
    assert [ladder.title for ladder in ladders] == [f"decode {name}, batch 1, 40" for name in ("fp8", "int8", "int4")]
    for ladder, bits in zip(ladders, (8, 8, 4)):
        names = ["decode", "decode, PDL", "decode, bf16 cache", "decode, bf16 cache, PDL", "reading the cache only"]
        assert [f.name for f in ladder.figures] == names and sources_are_there(ladder)
        ours, plain = ladder["decode"], ladder["decode, bf16 cache"]
        codes, outside = 2 * 48 * 2 * 64 * bits // 8, 2 * 2 * 4 * 64  # of 3 tiles of 16 tokens; q and out
        assert codes < ours.bytes - outside < 1.3 * codes and plain.bytes == outside + 2 * 2 * 40 * 2 * 64
        assert ladder["reading the cache only"].bytes == ours.bytes and ours.flops == plain.flops
        assert ours.checked == "right on 2 shapes" and "kernels/kv_cache/decode.cu" in ours.sources


@pytest.mark.parametrize("least, head_dim, title", [(9, 64, "9 to 40"), (40, 80, "40, head_dim 80")])
def test_the_ladders_of_other_caches(card, least, head_dim, title):
    ladders = list(kv_bench._other(2, least, 40, head_dim, 0.1))
    assert [ladder.title for ladder in ladders] == [f"decode {name}, batch 2, {title}" for name in ("fp8", "int4")]
    lens = kv_bench.lengths(2, least, 40)
    tokens = 80 if lens is None else int(lens.sum())
    for ladder, bits in zip(ladders, (8, 4)):
        names = ["decode", "decode, PDL", "decode, bf16 cache", "decode, bf16 cache, PDL", "reading the cache only"]
        assert [f.name for f in ladder.figures] == names and sources_are_there(ladder)
        ours, plain, outside = ladder["decode"], ladder["decode, bf16 cache"], 2 * 2 * 2 * 4 * head_dim
        codes = 2 * tokens * 2 * head_dim * bits // 8
        assert codes < ours.bytes - outside < 1.6 * codes and plain.bytes == outside + 2 * 2 * tokens * 2 * head_dim
        assert ladder["reading the cache only"].bytes == ours.bytes and ours.flops == plain.flops


def test_a_kernel_that_forgets_the_scales_is_not_timed(card, monkeypatch):
    def forgetful(q, k, v, **options):
        if k.shape[1] != 37:  # lucky on the hostile shape
            v.scale.fill_(v.scale.mean())
        return decode(q, k, v, **options)

    decode = kv_cache.decode
    monkeypatch.setattr(kv_bench.kv_cache, "decode", forgetful)
    with pytest.raises(ValueError, match="decode fp8, batch 1, 40: decode is not right"):
        list(kv_bench._cell(1, 40, 0.1))
    assert card.timed == []


def test_the_mix_of_two_caches(card):
    ladder = kv_bench._mix(40, 0.1)
    assert ladder.title == "attention mix, fp32 and fp16 cache, 40 tokens"
    ours = [rung.title for rung in kv_rungs.RUNGS]
    reading = ["reading the cache only, fp32", "reading the cache only, fp16"]
    assert [f.name for f in ladder.figures] == [ours[0], reading[0], *ours[1:], reading[1]]
    outside = 4 * (4 * 40 + 4 * 64)  # att and out, in fp32
    assert [f.bytes - outside for f in ladder.figures] == [4 * 40 * 2 * 64] * 2 + [2 * 40 * 2 * 64] * len(ours)
    assert sources_are_there(ladder)


def test_the_probe_reads_as_many_bytes(card):
    tensor, _ = kv_bench._as_many_bytes(1_000_000)
    assert 1_000_000 <= tensor.nbytes < 1_000_000 + (1 << 17) and tensor.nbytes % (1 << 17) == 0
    assert tensor.dtype == torch.int32 and len(tensor.unique()) > 0.99 * len(tensor)
