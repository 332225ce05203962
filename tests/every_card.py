"""Do all kernels compile for every card, or say what runs there instead? python -m tests.every_card, or make cards.

every_card.txt has the sources of kernels/, each with options that tests on a CPU have compiled it with: one line a
choice. Each is compiled for each architecture, to machine code, by NVRTC and its assembler. There are three ends:

    compiled     it runs there
    refused      kernels/needs.json says that it is not for such a card, and what runs there; or bfloat16 on tensor
                 cores is asked of a card before 8.0, which lab.cuda says with float16 as the way out
    failed       anything else, which is a fault of ours

    python -m tests.every_card                    all of them: 4000 compilations, a quarter of an hour on two cores
    python -m tests.every_card sm_75 gemv/        those for this architecture, of sources with this in their names

It ends with 1 where one failed, or where a card is refused a source that compiles for it.
"""

import collections
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from lab import card, cuda
from lab.cuda import needs

ROOT = Path(__file__).resolve().parent.parent
KERNELS, LIST = ROOT / "kernels", Path(__file__).with_suffix(".txt")
BFLOAT16 = "bfloat16 on tensor cores needs a card of compute capability 8.0"


def choices():
    """[(source, options)], sources as paths below kernels/."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return [(source, tuple(options)) for source, *options in (line.split(" | ") for line in lines)]


def end(source, options, target):
    """("compiled", ""), ("refused", why) or ("failed", why) of a source on a lab.card.Card."""
    entry = needs.of(KERNELS / source)
    arch = f"{target.arch}a" if entry and target.arch == "sm_90" else target.arch
    module = cuda.load(KERNELS / source, options)
    try:
        with card.as_if(target):
            module._arch_on(None)  # which asks needs.json
    except RuntimeError as error:
        try:
            module.cubin(arch)
        except Exception:  # the compiler's own word for it
            return "refused", str(error)
        return "failed", f"is refused, and compiles: {error}"
    try:
        module.cubin(arch)
    except Exception as error:
        said = needs.refused(getattr(error, "log", ""), f"{target.name}, {'.'.join(map(str, target.capability))}")
        refused = BFLOAT16 in said and any("bfloat16" in option for option in options)
        return ("refused", f"{module.name}: {said}") if refused else ("failed", said or str(error))
    return "compiled", ""


def _end_of(job):
    return job, end(*job)


def main(words):
    """Compile those that the words name; 1 where one failed."""
    arches = {one.arch: one for one in card.CARDS}
    cards = [arches.pop(word) for word in words if word in arches] or list(card.CARDS)
    names = [word for word in words if not word.startswith("sm_")]
    jobs = [(s, o, c) for s, o in choices() if not names or any(n in s for n in names) for c in cards]
    begin, counts, failed = time.perf_counter(), collections.Counter(), 0
    with ProcessPoolExecutor() as pool:
        for (source, options, target), (how, why) in pool.map(_end_of, jobs, chunksize=16):
            counts[target.arch, how] += 1
            counts[target.arch, "bfloat16"] += how == "refused" and BFLOAT16 in why
            if how == "failed":
                failed += 1
                print(f"{source} for {target.arch}, {' '.join(options) or 'no options'}: {why}", flush=True)
    print(f"{'':8}{'compiled':>10}{'refused':>10}{'(bfloat16)':>12}{'failed':>10}")
    for one in cards:
        numbers = [counts[one.arch, how] for how in ("compiled", "refused", "bfloat16", "failed")]
        print(f"{one.arch:8}{numbers[0]:10}{numbers[1]:10}{numbers[2]:12}{numbers[3]:10}  as on {one.name}")
    print(f"{len(jobs)} in {time.perf_counter() - begin:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
