"""Ladders: the figures' arithmetic, the table in its three forms, and what the pictures hold."""

import importlib
import re

import pytest
from matplotlib.colors import to_hex
from pytest import approx

from lab import Ladder, Roof, Timing, check, ladder, plots
from lab.figure import NOISE, Figure
from lab.ladder import CALLED, HEADINGS

ROOF = Roof("a card", read=20e9, copy=15e9, flops=100e9)


def figure(name="a", bytes=10**9, flops=2 * 10**9, median=0.1, share=0.5, bound="read", **more):
    return Figure(name, bytes, flops, Timing(median, 0.9 * median, 1.2 * median, 9), share, bound, **more)


@pytest.fixture
def probe(monkeypatch):
    """A probe that moves 1 GB (or does 10 GFLOP) in a second, and rungs that take as long as their name says."""
    log = []

    def against(probe, functions, **_):
        log.append(list(functions))
        for function in functions.values():
            function()
        seconds = {name: float(re.search(r"[\d.]+", name)[0]) for name in functions}
        return {name: (Timing(2 * s, s, 3 * s, 5), s) for name, s in seconds.items()}  # a machine at half speed

    monkeypatch.setattr(ladder, "against", against)
    monkeypatch.setattr(ladder, "read_probe", lambda: (None, 10**9))
    monkeypatch.setattr(ladder, "flops_probe", lambda: (None, 10**10))
    monkeypatch.setattr(ladder, "roof", lambda: ROOF)
    return log


# Figures


def test_rate_and_roof():
    read, arithmetic = figure(), figure(bound="flops")
    assert read.rate == approx(1e9 / 0.1) and read.roof == approx(20e9)
    assert arithmetic.rate == approx(2e9 / 0.1) and arithmetic.roof == approx(40e9)


@pytest.mark.parametrize(
    ("share", "impossible"), [(0.5, False), (1.0, False), (NOISE, False), (NOISE + 0.01, True), (9, True)]
)
def test_above_the_roof_is_impossible(share, impossible):
    f = figure(share=share)
    assert f.impossible is impossible and 1 < NOISE < 1.2
    assert ("impossible: above the roof" in " ".join(f.cells(f))) is impossible


def test_cublas_can_be_surpassed():
    f = figure(share=1.2, bound="flops")
    assert f.impossible and not figure(share=1.2, bound="flops", called=f.timing).impossible
    assert figure(share=1.2, called=f.timing).impossible


def test_work_has_a_fitting_unit():
    f = figure(bytes=402_653_184, flops=2 * 8192**3)
    assert f.cells(f)[2] == "403 MB, 1.1 TFLOP"


def test_speedup_is_at_equal_work():
    single, half = figure(bytes=4000, flops=2000, median=0.1), figure(bytes=2000, flops=2000, median=0.04)
    assert half.speedup(single) == approx(2.5)  # the same flops, from half the bytes
    assert single.speedup(half) == approx(0.4)
    small, large = (figure(flops=n, median=s, bound="flops") for n, s in ((10, 0.5), (3000, 1.5)))
    assert large.speedup(small) == approx(100)  # 300 times the work in 3 times the time


@pytest.mark.parametrize(
    ("amount", "bound", "text"),
    [
        (5e9, "read", "5 GB/s"),
        (999.2e9, "read", "999 GB/s"),
        (999.9e9, "read", "1 TB/s"),
        (4321e9, "read", "4.32 TB/s"),
        (700e12, "flops", "700 TFLOP/s"),
        (38.6e9, "flops", "38.6 GFLOP/s"),
    ],
)
def test_rates_have_a_fitting_unit(amount, bound, text):
    f = figure(bytes=int(amount), flops=int(amount), median=1, bound=bound)
    assert f.rate_text == text and text in f.cells(f)


# Timing rungs


def test_add_holds_a_rung_against_the_probe(probe):
    steps = Ladder("GEMV", "read")
    card = steps.add("takes 4", lambda: None, bytes=2 * 10**9, flops=10**9)
    f = steps["takes 4"]
    assert f.share == approx(2 / 1 / 4)  # twice the bytes in four times the time
    assert f.timing.median == 8 and f.rate == approx(2e9 / 8) and f.checked == "not checked"
    assert isinstance(card, Ladder) and card.figures == [f] and card.title == "takes 4"
    in_flops = Ladder("matmul", "flops")
    in_flops.add("takes 4", lambda: None, bytes=1, flops=2 * 10**10)
    assert in_flops["takes 4"].share == approx(0.5)


def test_rungs_are_timed_anew_together(probe):
    steps = Ladder("GEMV", "read")
    steps.plan("takes 8", lambda: None, bytes=10**9, flops=1, sources=["kernels/vec.h"])
    assert steps.figures == [] and probe == []
    steps.add("takes 4", lambda: None, bytes=10**9, flops=1)
    assert steps.again() is steps
    assert probe == [["takes 4"], ["takes 8", "takes 4"]]
    assert [f.name for f in steps.figures] == ["takes 8", "takes 4"]
    assert steps["takes 8"].sources == ("kernels/vec.h",)
    assert steps.speedup("takes 4", over="takes 8") == approx(2)


def test_a_rung_that_is_timed_once_more_keeps_its_place(probe):
    steps = Ladder("GEMV", "read")
    for name in ("takes 8", "takes 4", "takes 8"):
        card = steps.add(name, lambda: None, bytes=10**9, flops=1)
    assert [f.name for f in steps.figures] == ["takes 8", "takes 4"]
    assert card.rows() == steps.rows()[:1]


def test_a_scorecards_speedup_is_over_the_ladders_first_rung(probe):
    steps = Ladder("GEMV", "read")
    steps.add("takes 8", lambda: None, bytes=10**9, flops=1)
    card = steps.add("takes 2", lambda: None, bytes=10**9, flops=1)
    assert card.rows() == steps.rows()[1:] and card.rows()[0][-1].startswith("4")


def test_a_wrong_rung_is_not_timed(probe):
    wrong = check(lambda x: -x, lambda x: x, lambda rng, n: (rng.random(n),), [(3,)])
    right = check(lambda x: x, lambda x: x, lambda rng, n: (rng.random(n),), [(3,), (4,)])
    steps = Ladder("GEMV", "read")

    def never():
        raise AssertionError("timed")

    for method in (steps.add, steps.plan):
        with pytest.raises(ValueError, match="takes 4 is not right, so it is not timed: wrong at shape 3"):
            method("takes 4", never, bytes=1, flops=1, verdict=wrong)
    assert steps.figures == [] and probe == [] and steps.calls == {}
    steps.add("takes 4", lambda: None, bytes=1, flops=1, verdict=right)
    assert steps["takes 4"].checked == "right on 2 shapes"


def test_a_ladder_with_nothing_to_time_says_so(probe):
    with pytest.raises(ValueError, match="GEMV: there is no rung to time"):
        Ladder("GEMV", "read", [figure()]).again()


def test_unknown_names_and_bounds_are_refused():
    with pytest.raises(ValueError, match='bound must be "read" or "flops", got \'copy\''):
        Ladder("GEMV", "copy")
    with pytest.raises(ValueError, match='device must be "cpu" or "cuda", got \'gpu\''):
        Ladder("GEMV", "read", device="gpu")
    with pytest.raises(KeyError, match="no rung 'c'; there are a, b"):
        Ladder("GEMV", "read", [figure("a"), figure("b")])["c"]


# Tables

NASTY = '<b>"x" & y | z'


@pytest.fixture
def nasty():
    """A ladder whose names would break HTML and Markdown, with a stale and an impossible figure."""
    figures = [
        figure("plain", share=0.04),
        figure(NASTY, median=0.005, share=0.8, stale=True),
        figure("cached", share=1.5),
    ]
    return Ladder("GEMV <8192>", "read", figures, "stored run: a card, 2026-01-02")


def test_the_rows_hold_the_figures(nasty):
    plain, stale, impossible = nasty.rows()
    assert len(plain) == len(HEADINGS) and HEADINGS[0] == "rung"
    cells = dict(zip(HEADINGS, plain))
    assert (cells["rung"], cells["checked"], cells["of the roof"]) == ("plain", "not checked", "4 %")
    assert cells["rate"] == "10 GB/s" and cells["speed-up"] in ("1×", "1.0×")
    assert cells["time"].startswith("100 ms") and "90" in " ".join(plain) and "120" in " ".join(plain)
    assert "1" in cells["work"] and "GB" in cells["work"] or "MB" in cells["work"]
    assert "stale" in stale[0] and "stale" not in plain[0] + impossible[0]
    assert stale[-1] == "20×" and stale[HEADINGS.index("of the roof")] == "80 %"
    assert impossible[HEADINGS.index("of the roof")].startswith("150 %") and "impossible" in " ".join(impossible)
    flops = Ladder("matmul", "flops", [figure(bound="flops")])
    assert "20 GFLOP/s" in flops.rows()[0]


def test_the_text_table(nasty):
    caption, headings, *rows = str(nasty).splitlines()
    assert caption == "GEMV <8192> (stored run: a card, 2026-01-02)"
    assert len(rows) == 3 and rows[1].startswith(NASTY) and repr(nasty) == str(nasty)
    for heading in HEADINGS:  # columns stand below their headings
        at = headings.index(heading)
        assert all(len(row) <= at or at == 0 or row[at - 1] == " " != row[at] for row in rows)
    assert str(Ladder("live", "read", [figure()])).splitlines()[0] == "live"


def test_the_html_table_is_escaped(nasty):
    text = nasty._repr_html_()
    assert "<b>&quot;" not in text and "<b>&lt;" not in text
    assert "&lt;b&gt;&quot;x&quot; &amp; y | z" in text and "GEMV &lt;8192&gt;" in text
    columns = len(HEADINGS) - 1  # the work, which is the same for all, stands in the caption
    assert text.count("<tr>") == 4 and text.count("<td") == 3 * columns and text.count("<th ") == columns
    assert text.count(nasty.rows()[0][2]) == 1 and f"{nasty.rows()[0][2]} each" in text
    assert "stored run: a card, 2026-01-02" in text and "stale" in text and "impossible" in text


def test_the_markdown_table_is_escaped(nasty):
    lines = nasty.markdown().splitlines()
    assert len(lines) == 5
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(HEADINGS) + 1}
    assert r"y \| z" in lines[3]
    few = nasty.markdown(("rung", "rate")).splitlines()
    assert few[:3] == ["| rung | rate |", "|---|---|", "| plain | 10 GB/s |"]


def test_as_called_is_a_column_where_it_was_timed(nasty):
    assert nasty.headings == HEADINGS and CALLED not in str(nasty)
    called = figure("called", called=Timing(0.25, 0.2, 0.3, 5))
    both = Ladder("GEMV", "read", [figure("not called"), called], device="cuda")
    assert [h for h in both.headings if h != CALLED] == list(HEADINGS)
    cells = [dict(zip(both.headings, row)) for row in both.rows()]
    assert [c[CALLED] for c in cells] == ["", "250 ms"] and [c["rate"] for c in cells] == ["10 GB/s"] * 2
    assert [len(row) for row in both.rows()] == [len(HEADINGS) + 1] * 2 and cells[0]["time"] == "100 ms"
    assert "250 ms" in str(both)
    assert both._repr_html_().count("<th ") == len(HEADINGS)  # the work, the same in both, stands above
    assert both.markdown(("rung", CALLED)).splitlines()[-1] == "| called | 250 ms |"


# Pictures


def bars_of(axis):
    return [bar for container in axis.containers for bar in container]


def test_bars_hold_the_shares(nasty):
    picture = nasty.bars()
    (axis,) = picture.axes
    bars = bars_of(axis)
    assert [b.get_width() for b in bars] == approx([4, 80, 150])
    assert [to_hex(b.get_facecolor()).upper() for b in bars] == [plots.BLUE, plots.BLUE, plots.RED]
    names = [t.get_text() for t in axis.get_yticklabels()]
    assert names[0] == "plain" and names[2] == "cached" and NASTY in names[1] and "stale" in names[1]
    roofs = [line for line in axis.lines if list(line.get_xdata()) == [100, 100]]
    assert len(roofs) == 1 and axis.yaxis_inverted()
    assert [t.get_text() for t in axis.texts] == ["10 GB/s", "200 GB/s", "10 GB/s"]
    assert axis.get_xscale() == "linear" and axis.get_xlim()[1] > 150
    title = axis.get_title(loc="left")
    assert "GEMV <8192>" in title and "stored run: a card, 2026-01-02" in title
    assert "percent" in axis.get_xlabel()


def test_very_different_rungs_are_dots_on_a_logarithmic_axis():
    axis = Ladder("m", "flops", [figure(share=s, bound="flops") for s in (1e-5, 0.9)]).bars().axes[0]
    assert axis.get_xscale() == "log" and axis.get_xlim()[0] < 1e-3 and axis.get_xlim()[1] > 100
    (dots,) = axis.collections
    assert dots.get_offsets().tolist() == [approx([1e-3, 0]), approx([90, 1])] and not bars_of(axis)
    assert axis.texts[0].get_text() == "20 GFLOP/s" and "arithmetic" in axis.get_xlabel()


def points_of(axis):
    """{name: (x, y)} of the single points of a plot."""
    found = {}
    for line in axis.lines:
        if len(line.get_xdata()) == 1:
            found[line.get_label()] = (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
    return found


def test_the_roofline_is_the_roof():
    axis = plots.roofline(ROOF, [("kernel", 2.0, 10e9), ("best", 50.0, None), ("low", 0.5, None)]).axes[0]
    found = points_of(axis)
    assert found == {"kernel": approx((2, 10)), "best": approx((50, 100)), "low": approx((0.5, 10))}
    line = max(axis.lines, key=lambda found: len(found.get_xdata()))
    x, y = line.get_xdata(), line.get_ydata()
    assert y == approx(ROOF.attainable(x) / 1e9) and x[0] < 2 and x[-1] > 50
    assert axis.get_xscale() == axis.get_yscale() == "log" and axis.get_ylabel() == "GFLOP/s"
    said = " ".join(t.get_text() for t in axis.texts)
    assert "ridge: 5" in said and "20 GB/s" in said and "100 GFLOP/s" in said and "a card" in axis.get_title(loc="left")
    for x, y in points_of(axis).values():
        assert axis.get_xlim()[0] < x < axis.get_xlim()[1] and axis.get_ylim()[0] < y < axis.get_ylim()[1]


def test_a_roofline_without_points():
    axis = plots.roofline(ROOF, title="mine").axes[0]
    assert points_of(axis) == {} and axis.get_title(loc="left") == "mine"


def test_a_ladder_on_the_roofline(probe):
    steps = Ladder("GEMV", "read", [figure("a", share=0.5), figure("b", bytes=5 * 10**8, share=0.25)])
    found = points_of(steps.roofline(ROOF).axes[0])
    assert found == {"a": approx((2, 20)), "b": approx((4, 20))}  # a share of 20 GB/s · 2, of 20 · 4
    assert points_of(steps.roofline().axes[0]) == found  # this machine's roof
    product = Ladder("matmul", "flops", [figure("c", bytes=10**7, share=0.5, bound="flops")])
    assert points_of(product.roofline(ROOF).axes[0]) == {"c": approx((200, 50))}


def test_a_gpus_ladder_stands_under_the_gpus_roof(monkeypatch):
    steps = Ladder("GEMV", "read", [figure("a", share=0.5)], device="cuda")
    monkeypatch.setattr(ladder, "roof", lambda: pytest.fail("the processor's roof was asked for"))
    monkeypatch.setattr(ladder, "gpu_roof", lambda: ROOF)
    assert points_of(steps.roofline().axes[0]) == {"a": approx((2, 20))}
    monkeypatch.setattr(ladder, "gpu_roof", lambda: None)
    with pytest.raises(ValueError, match="GEMV: this machine has no GPU; give the roof"):
        steps.roofline()
    assert points_of(steps.roofline(ROOF).axes[0]) == {"a": approx((2, 20))}


def test_pictures_are_not_kept_open(nasty):
    pyplot = importlib.import_module("matplotlib.pyplot")
    before = pyplot.get_fignums()
    nasty.bars(), plots.roofline(ROOF)
    assert pyplot.get_fignums() == before
