"""The report of a launch: sums, ratios, and the two tables."""

import html.parser
import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import simt
from simt.report import CONFLICTS, NOTE, REQUESTS, SECTORS, SHARED, THREADS, WAVEFRONTS, Report

STORED = json.loads((Path(__file__).parent / "simt_truth" / "h200.json").read_text())["launches"]
SOURCE = """\
extern "C" __global__ void k(const float *x, float *y) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x * 2];
    __syncthreads();
    if (threadIdx.x < 16) y[threadIdx.x] = s[threadIdx.x * 4] < 0 ? 0 : 1;   // a comment that makes this line long
    skipped();
}
"""
COUNTS = {
    5: {
        "instructions": 6,
        "thread_instructions": 6 * 16,
        SHARED.format("ld"): 1,
        WAVEFRONTS.format("ld"): 2,
        CONFLICTS.format("ld"): 1,
        REQUESTS.format("st"): 1,
        SECTORS.format("st"): 2,
    },
    3: {
        "instructions": 1230,
        "thread_instructions": 1230 * 32,
        REQUESTS.format("ld"): 2,
        SECTORS.format("ld"): 17,
        SHARED.format("st"): 2,
        WAVEFRONTS.format("st"): 2,
    },
    6: {"instructions": 0},
}


def report(counts=COUNTS, **more):
    return Report("k", SOURCE, counts, **more)


def test_every_counter_of_the_hardware_is_there_even_where_nothing_ran():
    want = set(next(iter(STORED.values()))["counters"])
    empty = report({}).counters
    assert set(empty) == want and not any(empty.values())
    assert set(report().counters) == want and all(set(line) == want for line in report().lines.values())


def test_counters_are_sums_over_lines():
    counters = report().counters
    assert counters["smsp__inst_executed.sum"] == 1236 and type(counters["smsp__inst_executed.sum"]) is int
    assert counters[SECTORS.format("ld")] == 17 and counters[SECTORS.format("st")] == 2
    active = (6 * 16 + 1230 * 32) / 1236
    assert counters["smsp__thread_inst_executed_per_inst_executed.ratio"] == pytest.approx(active)
    assert list(report().lines) == [3, 5]
    assert report().lines[5]["smsp__thread_inst_executed_per_inst_executed.ratio"] == 16


def test_ratios():
    r = report()
    assert r.sectors_per_request() == 8.5 and r.sectors_per_request("st") == 2
    assert r.sectors_per_request("atom") == 0
    assert r.wavefronts_per_request() == 2 and r.wavefronts_per_request("st") == 1
    assert r.bank_conflicts == 1
    with pytest.raises(ValueError, match="op: expected one of 'ld', 'st'; got 'atom'"):
        r.wavefronts_per_request("atom")


def test_the_table():
    title, *heads, third, fifth, totals, note = str(report(grid=(1, 2), block=(64, 1, 1))).split("\n")
    assert title == "k: grid 1 × 2, block 64" and note == NOTE and len(heads) == 2
    assert third.split() == "3 s[threadIdx.x] = x[threadIdx.x * 2]; 1,230 32 2 8.5 2 1".split()
    assert fifth.split()[-6:] == ["6", "16", "1", "2", "1", "2"] and "…" in fifth and "comment that" not in fifth
    assert totals.split() == ["all", "1,236", "31.92", "3", "6.33", "3", "1.33"]
    assert len(third) == len(fifth) == len(totals) == len(heads[1])  # right-aligned


def test_lines_without_memory_leave_cells_empty_and_unknown_lines_say_so():
    text = str(report({0: {"instructions": 5, "thread_instructions": 160}, 99: {"instructions": 1}}))
    assert text.count("(no source line)") == 2
    assert text.split("\n")[3].split() == ["(no", "source", "line)", "5", "32"]
    assert str(Report("k", None, {3: {"instructions": 1}})).count("(no source line)") == 1


class Cells(html.parser.HTMLParser):
    """The table's rows as text; fails on tags that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag != "br":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def test_the_html_table_holds_the_same_cells():
    r = report()
    text = r._repr_html_()
    head, *rows = Cells(text).rows
    assert len(head) == 8 and [row[2:] for row in rows] == [list(cells) for *_, cells in r.rows()]
    assert rows[1][1].startswith("if (threadIdx.x < 16)") and "&lt; 16" in text and NOTE in text


def test_what_the_kernel_printed_is_kept():
    assert report(printed="hello\n").printed == "hello\n" and report().printed == ""
    assert repr(report()) == "<Report of k: grid 1, block 1: 1236 warp instructions>"


def test_what_was_printed_is_shown():
    report = Report("k", "line", {1: {"instructions": 1}}, printed="<1>\n2\n")
    page = report._repr_html_()
    assert str(report).endswith("printed:\n<1>\n2") and "<pre><code>&lt;1&gt;\n2\n</code></pre>" in page
    assert "printed" not in str(Report("k", "line", {1: {"instructions": 1}}))


UNEVEN = r"""
extern "C" __global__ void uneven(const float *x, float *out) {
    __shared__ float sum;
    int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    float mine = 0;
    for (int n = 0; n < warp + blockIdx.x; n++) mine += x[32 * n + threadIdx.x % 32];
    if (warp == 1) atomicAdd(&sum, mine);
    __syncthreads();
    if (warp < 2 && threadIdx.x % 32 == 5) out[blockIdx.x] = sum;
}
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")
@pytest.mark.parametrize("how", [{}, {"order": "reverse"}, {"order": 3, "places": 2}], ids=str)
def test_requests_are_counted_by_block_and_warp_where_asked_for(how):
    kernel = simt.compile(UNEVEN)["uneven"]
    args = np.ones(256, np.float32), np.zeros(5, np.float32)
    assert kernel(5, 72, *args).by_warp is None
    report = kernel(5, 72, *args, by_warp=True, **how)  # 72 threads: the last warp has eight
    loads = report.by_warp[REQUESTS.format("ld")]
    assert loads.tolist() == [[block + warp for warp in range(3)] for block in range(5)]
    assert report.by_warp[REQUESTS.format("st")].tolist() == [[1, 1, 0]] * 5
    assert report.by_warp[THREADS.format("st")].tolist() == [[1, 1, 0]] * 5
    threads = report.by_warp[THREADS.format("ld")]
    assert threads.tolist() == [[32 * block, 32 * (block + 1), 8 * (block + 2)] for block in range(5)]
    assert report.by_warp[SHARED.format("atom")].tolist() == [[0, 1, 0]] * 5
    assert all(report.counters[name] == made.sum() for name, made in report.by_warp.items() if name in report.counters)


# Launches that count nothing

PRINTS = r"""
extern "C" __global__ void half(float *x, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) x[threadIdx.x] = s[n - 1 - threadIdx.x];
    if (threadIdx.x == 0) printf("n = %d\n", n);
}
"""


def test_what_is_not_counted_is_computed_all_the_same():
    kernel, x = simt.compile(PRINTS)["half"], np.arange(64, dtype=np.float32)
    counted = kernel(1, 64, x.copy(), np.int32(20))
    with simt.uncounted():
        report = kernel(1, 64, x, np.int32(20), check_races=True)
        with pytest.raises(simt.MemoryFault, match=r"reads x\[63\], but x has 63"):
            kernel(1, 64, np.zeros(63, np.float32), np.int32(20))
        asked = kernel(1, 64, x.copy(), np.int32(20), by_warp=True)
    assert (x == [*range(19, -1, -1), *range(20, 64)]).all()
    assert counted.counted and asked.counted and asked.counters == counted.counters and asked.by_warp
    assert not report.counted and report.printed == "n = 20\n"
    for ask in (
        lambda: report.counters,
        lambda: report.lines,
        report.sectors_per_request,
        lambda: report.bank_conflicts,
    ):
        with pytest.raises(simt.LaunchError, match=r"^half: this launch ran within simt.uncounted\(\), so its report"):
            ask()
    assert str(report) == "<Report of half: grid 1, block 64: nothing was counted>\nprinted:\nn = 20"
    assert "nothing was counted" in report._repr_html_() and not hasattr(report, "no_such_thing")
    assert kernel(1, 64, x, np.int32(20)).counters == counted.counters  # from here on it counts again


def test_another_thread_counts():
    kernel, found = simt.compile(PRINTS)["half"], []
    with simt.uncounted():
        thread = threading.Thread(target=lambda: found.append(kernel(1, 64, np.zeros(64, np.float32), np.int32(1))))
        thread.start(), thread.join()
    assert found[0].counted
