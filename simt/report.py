"""What a launch did, as counters by Nsight Compute's names and as a table by source line."""

import html

from simt.counting import nothing_counted

REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_{}.sum"
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
SHARED = "smsp__inst_executed_op_shared_{}.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
THREADS = "simt__threads_mem_global_op_{}.sum"  # of the requests; a name of our own
LINK = "simt__link_bytes_op_{}.sum"  # to and from another device's memory (simt/devices.py)
INSTRUCTIONS = "smsp__inst_executed.sum"
ACTIVE = "smsp__thread_inst_executed_per_inst_executed.ratio"
GLOBAL_OPS = ("ld", "st", "red", "atom")
SHARED_OPS = ("ld", "st")
SUMS = (
    *(name.format(op) for name in (REQUESTS, SECTORS) for op in GLOBAL_OPS),
    *(name.format(op) for name in (SHARED, WAVEFRONTS, CONFLICTS) for op in SHARED_OPS),
    "smsp__inst_executed_op_ldgsts.sum",
)
BESIDE = ("simt__bulk_load_bytes.sum", "simt__bulk_store_bytes.sum", "simt__wgmma.sum")  # names of our own
COLUMNS = (
    ("warp", "instructions"),
    ("threads", "each"),
    ("global", "requests"),
    ("sectors", "each"),
    ("shared", "requests"),
    ("wavefronts", "each"),
)
NOTE = (
    "Sectors (32 bytes) and requests are those of the L1 cache, not bytes from DRAM; instructions are PTX's; "
    "nothing here is a time."
)
TEXT_WIDTH = 48  # characters of a source line that the table shows
# How cells look: once for pages that drop style, and once for those that align as they like.
LEFT, RIGHT = 'align="left" nowrap style="text-align:left"', 'align="right" style="text-align:right"'


class Report:
    """What one launch did.

    counters   {ncu's metric name: number} of the whole launch
    lines      {source line: the same of that line}; line 0 is code that no line is known for
    printed    what the kernel's printf wrote
    by_warp    {ncu's metric name: requests of each block and warp, an array (blocks, warps)}, if the launch was asked
               for it: to global memory as in counters; to shared memory, atomics too (..._op_shared_atom.sum).
               "simt__threads_mem_global_op_st.sum", and so on: the threads that were in these requests
    waited     has a thread passed griddepcontrol.wait?
    waits_first   does that come before griddepcontrol.launch_dependents in the kernel's code?
    ahead      what the launch may still be at when the next one starts, an Ahead; None: that starts at its end
    grid, block, kernel, source: of the launch

    `counts` is {line: {metric: int}}, where "instructions" and "thread_instructions" count what warps and threads
    executed. It prints as a table with a row for every line that ran, and the totals last.
    """

    def __init__(self, kernel, source, counts, printed="", grid=1, block=1, by_warp=None):
        self.kernel, self.source, self.printed, self.by_warp = kernel, source, printed, by_warp
        self.grid, self.block = grid, block
        self.waited, self.waits_first, self.ahead = False, False, None
        if counts is None:
            return  # see __getattr__
        self.lines = {line: whole(counts[line]) for line in sorted(counts) if any(counts[line].values())}
        totals = {}
        for here in counts.values():
            for key, value in here.items():
                totals[key] = totals.get(key, 0) + value
        self.counters = whole(totals)

    def __getattr__(self, name):
        """What is not there: of a launch that counted nothing, what it would have counted."""
        if name in ("counters", "lines"):
            raise nothing_counted(self.kernel, name)
        raise AttributeError(f"a Report has no {name!r}")

    def sectors_per_request(self, op="ld"):
        """32-byte sectors per request of a warp to global memory: 4 for neighbouring floats. 0.0 without a request.

        op   "ld", "st", "red" (an atomic whose result is not used) or "atom"
        """
        check_op(op, GLOBAL_OPS)
        return ratio(self.counters[SECTORS.format(op)], self.counters[REQUESTS.format(op)])

    def wavefronts_per_request(self, op="ld"):
        """Wavefronts per request of a warp to shared memory: 1 for neighbouring floats. op: "ld" or "st"."""
        check_op(op, SHARED_OPS)
        return ratio(self.counters[WAVEFRONTS.format(op)], self.counters[SHARED.format(op)])

    @property
    def bank_conflicts(self):
        """Wavefronts of loads and stores that would not be needed if no two words lay in one bank."""
        return sum(self.counters[CONFLICTS.format(op)] for op in SHARED_OPS)

    @property
    def counted(self):
        """Whether the launch counted: one within simt.uncounted() did not."""
        return "counters" in vars(self)

    def __repr__(self):
        if not self.counted:
            return f"<Report of {self.title()}: nothing was counted>"
        return f"<Report of {self.title()}: {self.counters[INSTRUCTIONS]} warp instructions>"

    def __str__(self):
        if not self.counted:
            return "\n".join([repr(self), *(["printed:", self.printed.rstrip("\n")] if self.printed else [])])
        rows = self.rows()
        texts = [text for _, text, _ in rows]
        columns = self.columns()
        widths = [max(map(len, (*head, *(cells[i] for *_, cells in rows)))) for i, head in enumerate(columns)]
        wide = max(map(len, texts))
        out = [self.title()]
        for i in range(2):
            out.append(" " * (6 + wide) + "".join(f"  {head[i]:>{w}}" for head, w in zip(columns, widths)))
        for number, text, cells in rows:
            numbers = "".join(f"  {cell:>{w}}" for cell, w in zip(cells, widths))
            out.append(f"{number:>5} {text:<{wide}}{numbers}".rstrip())
        beside = [self.beside()] if self.beside() else []
        said = ["printed:", self.printed.rstrip("\n")] if self.printed else []
        return "\n".join([*out, *beside, NOTE, *said])

    def _repr_html_(self):
        if not self.counted:
            return f"<pre><code>{html.escape(str(self))}</code></pre>"
        head = "".join(f"<th {RIGHT}>{a}<br>{b}</th>" for a, b in self.columns())
        body = []
        for number, text, cells in self.rows():
            cells = "".join(f"<td {RIGHT}>{cell}</td>" for cell in cells)
            body.append(f"<tr><td {RIGHT}>{number}</td><td {LEFT}><code>{html.escape(text)}</code></td>{cells}</tr>")
        beside = f"<div>{self.beside()}</div>" if self.beside() else ""
        text = f"<pre><code>{html.escape(self.printed)}</code></pre>"
        said = f"<div>printed:</div>{text}" if self.printed else ""
        return (
            f"<div><div>{html.escape(self.title())}</div>"
            f'<table style="font-size:85%"><thead><tr><th></th><th {LEFT}>line</th>{head}</tr>'
            f"</thead><tbody>{''.join(body)}</tbody></table>{beside}<div><small>{NOTE}</small></div>{said}</div>"
        )

    def title(self):
        return f"{self.kernel}: grid {shape(self.grid)}, block {shape(self.block)}"

    def beside(self):
        """What bulk copies and wgmma did, which no column counts; empty if there were none."""
        names = zip(("bytes to shared memory", "bytes from shared memory", "wgmma"), BESIDE)
        found = [f"{self.counters[name]:,} {what}" for what, name in names if name in self.counters]
        return "bulk copies and wgmma: " + ", ".join(found) if found else ""

    def columns(self):
        """The headings: without those on shared memory where none was used."""
        used = any(self.counters[name.format(op)] for name in (SHARED, WAVEFRONTS) for op in SHARED_OPS)
        return COLUMNS if used else COLUMNS[:4]

    def rows(self):
        """[(line number, its text, the cells)], the totals last."""
        source = (self.source or "").split("\n")
        found = []
        for line, counters in self.lines.items():
            text = source[line - 1].strip() if 0 < line <= len(source) else "(no source line)"
            text = text if len(text) <= TEXT_WIDTH else text[: TEXT_WIDTH - 1] + "…"
            found.append(("" if line == 0 else str(line), text, cells_of(counters)))
        shown = len(self.columns())
        return [(*row, cells[:shown]) for *row, cells in [*found, ("", "all", cells_of(self.counters))]]


def whole(counts):
    """Raw counts of a line or of the launch -> every counter, 0 where nothing was counted."""
    counters = {name: int(counts.get(name, 0)) for name in SUMS}
    instructions, threads = int(counts.get("instructions", 0)), int(counts.get("thread_instructions", 0))
    counters |= {
        name: int(value) for name, value in counts.items() if name not in ("instructions", "thread_instructions")
    }
    return counters | {INSTRUCTIONS: instructions, ACTIVE: ratio(threads, instructions)}


def cells_of(counters):
    """The table's six numbers, as text. Atomics and reductions are requests too."""
    requests = sum(counters[REQUESTS.format(op)] for op in GLOBAL_OPS)
    sectors = sum(counters[SECTORS.format(op)] for op in GLOBAL_OPS)
    shared = sum(counters[SHARED.format(op)] for op in SHARED_OPS)
    wavefronts = sum(counters[WAVEFRONTS.format(op)] for op in SHARED_OPS)
    instructions = counters[INSTRUCTIONS]
    return (
        number(instructions),
        number(counters[ACTIVE]) if instructions else "",
        number(requests) if requests else "",
        number(ratio(sectors, requests)) if requests else "",
        number(shared) if shared or wavefronts else "",
        number(ratio(wavefronts, shared)) if shared else "",
    )


def number(value):
    """12345 -> "12,345"; 4.0 -> "4"; 4.256 -> "4.26"."""
    text = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ratio(a, b):
    return a / b if b else 0.0


def shape(size):
    """(4, 2, 1) -> "4 × 2"; 16 -> "16"."""
    sizes = [int(n) for n in size] if isinstance(size, (tuple, list)) else [int(size)]
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return " × ".join(map(str, sizes))


def check_op(op, ops):
    if op not in ops:
        raise ValueError(f"op: expected one of {', '.join(map(repr, ops))}; got {op!r}")
