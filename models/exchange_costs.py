"""What a token's exchanges between devices move, and the time they must take: from measured times of one exchange.

    exchanges(config, 2)                 [Exchange("W_o", times 32, messages of 16384 bytes, ...), ...]
    seconds(config, 2, "memory")         of all of them, one after another: none can begin before the last has ended

"memory": stores over the link from the product's epilogue (kernels.collective); "messages": torch.distributed's
all_reduce, NCCL on cards. Times of one exchange are chapter 19's stored ones where there are any, else LAWS, seconds =
latency + bytes / rate, which two H200s over NVLink gave (NCCL 2.28.9). For a network between hosts give its own Law.
"""

from dataclasses import dataclass

from lab import results


@dataclass(frozen=True)
class Law:
    """Seconds of one exchange: latency + bytes / rate."""

    latency: float
    rate: float  # bytes a second

    def seconds(self, nbytes):
        return self.latency + nbytes / self.rate


LAWS = {"memory": Law(1.6e-6, 370e9), "messages": Law(6.3e-6, 270e9)}
ROWS = {"memory": "direct, PDL", "messages": "NCCL"}  # of the stored table
UNITS = {"K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange. message: bytes that are added up; sent: bytes that each device sends for it."""

    name: str
    times: int  # a token
    message: int
    sent: int


def exchanges(config, count, how="memory", element=2):
    """The kinds of exchanges of a token's step over `count` devices. element: bytes of a number, or a logit."""
    by_memory = how == "memory"
    # In memory a float and its number to each other device; as messages numbers by a ring, there and back
    hidden = config.hidden * (8 if by_memory else element)
    logits = config.vocab * element
    sent = (lambda n: (count - 1) * n) if by_memory else (lambda n: 2 * (count - 1) * n // count)
    found = [Exchange(name, config.n_layers, hidden, sent(hidden)) for name in ("W_o", "W_down")]
    return [*found, Exchange("logits", 1, logits, sent(logits))]


def seconds(config, count, how="memory", law=None):
    """Of a token's exchanges, one after another."""
    found = exchanges(config, count, how)
    return sum(e.times * one(how, e.message, count, law) for e in found)


def one(how, message, count=2, law=None):
    """Seconds of one exchange of a message of so many bytes: by a law, else as stored, else by LAWS."""
    if law is None and (row := _stored(how, count)) is not None:
        return _between(row, message)
    return (law or LAWS[how]).seconds(message)


def _stored(how, count):
    """[(bytes, seconds)] of chapter 19's stored run, or None."""
    run = results.stored_on("collective", f"x{count}")
    table = next((t for t in run.tables if t.title.startswith("all-reduce, ")), None) if run else None
    row = table.rows.get(ROWS[how]) if table else None
    if not row:
        return None
    return sorted((int(size[:-1]) * UNITS[size[-1]], 1e-6 * float(value)) for size, value in row.items())


def _between(row, message):
    """By the straight line between the two sizes around it; a shorter message takes as long as the shortest one."""
    if message <= row[0][0] or len(row) == 1:
        return row[0][1]
    behind = next((n for n in range(1, len(row)) if message <= row[n][0]), len(row) - 1)
    (a, before), (b, after) = row[behind - 1], row[behind]
    return before + (after - before) * (message - a) / (b - a)


def predict(config, count, how, law=None):
    """A line about it, for a person."""
    found, taken = exchanges(config, count, how), 1e6 * seconds(config, count, how, law)
    times, sent = sum(e.times for e in found), sum(e.times * e.sent for e in found)
    return (
        f"exchanges   {times} a token, {sent / 1e6:,.2f} MB sent by each of {count} devices: {taken:,.0f} µs, as one "
        f"by {how} takes on cards over NVLink"
    )
