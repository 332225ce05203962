"""python -m simt.examples: a line for each, then how many are right."""

import sys
import time

from simt import CompileError, CompilerMissing, SimtError
from simt.examples import NAMES, run


def main(names):
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"python -m simt.examples: no example {', '.join(unknown)}; there are {', '.join(NAMES)}")
    right = refused = 0
    for name in names or NAMES:
        start = time.perf_counter()
        try:
            said = f"right, {run(name)} launches"
            right += 1
        except CompilerMissing as error:
            sys.exit(f"python -m simt.examples: {error}")
        except (SimtError, CompileError) as error:
            said = f"refused: {error}"
            refused += 1
        except AssertionError as error:
            said = f"WRONG: {error}"
        print(f"{name:<24} {time.perf_counter() - start:5.1f} s  {said}", flush=True)
    count = len(names or NAMES)
    print(f"{right} of {count} right" + (f", {refused} refused" if refused else ""))
    return int(right + refused < count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
