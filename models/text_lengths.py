"""How long prompts and answers are, counted in a text that is at hand: this course.

    python -m models.text_lengths        counts them, and writes models/text_lengths.json

A reader goes through a section of a notebook with a model at his side. What he has read so far is the prompt; the code
cell that follows is the answer. So prompts grow along a section, and begin again with the next: many short ones, some
long. Tokens are those of models/small. The file is made once and kept: it is a trace, and the course may go on.
"""

import json
import sys
from pathlib import Path

from models.tokens import Tokens
from models.traffic import TRACE

ROOT = Path(__file__).resolve().parent.parent


def pairs(notebook, count):
    """[(prompt, answer), ...] of a notebook's cells, tokens. count(text) → tokens of a text"""
    found, so_far = [], 0
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and text.startswith(("# ", "## ")):
            so_far = 0  # a section begins
        tokens = count(text)
        if cell["cell_type"] == "code" and so_far and tokens:
            found.append((so_far, tokens))
        so_far += tokens
    return found


def main():
    """Count, and write the file."""
    tokens = Tokens(ROOT / "models" / "small")
    paths = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    found = []
    for path in paths:
        found += pairs(json.loads(path.read_text(encoding="utf-8")), lambda t: len(tokens.encode(t, special=False)))
    about = "tokens of a section of the course up to a code cell, and of that cell: python -m models.text_lengths"
    lines = ",\n".join("  " + json.dumps(found[n : n + 12])[1:-1] for n in range(0, len(found), 12))
    TRACE.write_text(f'{{\n "about": {json.dumps(about)},\n "pairs": [\n{lines}\n ]\n}}\n')
    print(f"{len(found)} pairs of {len(paths)} notebooks in {TRACE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
