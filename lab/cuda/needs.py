"""What a source needs of a card, and what to say where a card has less.

needs.json, in the folder of a source or one above it, lists the sources that are written for some cards alone:

    {"matmul/ring.cu": {"capability": "9.0 or newer", "for": "mbarriers", "instead": "kernels.matmul.mma"}}

"9.0" without "or newer" means 9.0 and no other. What is not listed runs on every card of the course. Of that, some
options do not: what the compiler then refuses (bfloat16 on tensor cores before 8.0) is said as a sentence, too.
"""

import functools
import json
import re
from pathlib import Path

FILE = "needs.json"
REFUSED = re.compile(r"(?:Feature|Modifier) '([^']+)' requires \.target sm_(\d+)")
FLOAT16 = "; float16 runs there: give every tensor of the call as .to(torch.float16), which ends at 65504"


def of(path):
    """The entry of a source, {"capability", "for", "instead"}; None where it runs on every card of the course."""
    path = Path(path).resolve()
    for folder in list(path.parents)[:4]:
        if (folder / FILE).is_file():
            return _read(folder / FILE).get(path.relative_to(folder).as_posix())
    return None


@functools.cache
def _read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def said(entry, card):
    """What to say, behind the source's name, on a card that an entry is not for. card: its name and capability"""
    return (
        f"needs a card of compute capability {entry['capability']}, for {entry['for']}, got {card}; "
        f"{entry['instead']} runs there"
    )


def fits(wanted, capability):
    """Whether a card has what is wanted, "9.0 or newer" or "9.0"."""
    number, newer = re.fullmatch(r"(\d+\.\d)( or newer)?", wanted).groups()
    least = tuple(map(int, number.split(".")))
    return tuple(capability) >= least if newer else tuple(capability) == least


def refused(log, card):
    """What to say where the compiler wants a newer card than this; "" where its complaint is another."""
    found = {feature: int(number) for feature, number in REFUSED.findall(log)}
    if not found:
        return ""
    number = max(found.values())
    bfloat16 = any("bf16" in feature for feature in found)
    what = "bfloat16 on tensor cores" if bfloat16 else next(name for name, n in found.items() if n == number)
    need = f"{number // 10}.{number % 10} or newer"
    return f"{what} needs a card of compute capability {need}, got {card}{FLOAT16 * bfloat16}"
