"""Build the site: `make site` runs this, and so does the workflow that publishes it.

    python -m book                       into build/site
    python -m book --repository A/B      pages link to this repository on GitHub, and to Colab

It needs what pyproject.toml's group `site` lists, and no network.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from book import pages, reference, sliders
from lab.cells import ROOT

NEEDED = ("sphinx", "myst_parser", "sphinx_book_theme", "latex2mathml", "ziamath", "brotli", "fontTools", "matplotlib")
FONT = "STIXTwoMath-Regular.ttf"


def missing():
    """Packages that are not there."""
    from importlib.util import find_spec

    return [name for name in NEEDED if find_spec(name) is None]


def prepare(work, repository):
    """Write Sphinx's sources and the files beside them into a fresh folder."""
    shutil.rmtree(work, ignore_errors=True)
    site = pages.Site(work, repository)
    for chapter, cell in sliders.CHOSEN:
        site.sliders[chapter, cell] = sliders.markup(sliders.find(chapter, cell))
    pages.parts()
    for name in pages.chapters():
        site.notebook("notebooks", name)
        if (ROOT / "exercises" / f"{name}.ipynb").is_file():
            site.notebook("exercises", name)
    site.glossary()
    site.readme()
    reference.write(site)
    site.source_pages()
    return site


def math_font(out):
    """The formulas' font, cut down to the characters that the pages have."""
    import ziamath
    from fontTools import subset

    used = set(map(chr, range(32, 127)))
    for page in out.rglob("*.html"):
        for formula in re.findall(r"<math.*?</math>", page.read_text(encoding="utf-8"), re.S):
            used |= set(re.sub(r"&#x([0-9A-Fa-f]+);", lambda c: chr(int(c[1], 16)), formula))
    # A browser slants single letters by itself: x is drawn as the italic letter of the font.
    italic = {chr(0x1D434 + i) for i in range(52)} | {chr(0x1D6A8 + i) for i in range(228)} | {"ℎ"}
    options = subset.Options(flavor="woff2", layout_features=["*"], notdef_outline=True, name_IDs=["*"])
    font = subset.load_font(str(next(Path(ziamath.__file__).parent.rglob(FONT))), options)
    cut = subset.Subsetter(options)
    cut.populate(text="".join(used | italic))
    cut.subset(font)
    subset.save_font(font, str(out / "_static" / "math.woff2"), options)


def finish(out):
    """Mend what the theme makes: its script with two thousand icons, of which the pages show ten (book.css has them),
    and buttons without a name."""
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"[ \t]*<script[^>]*fontawesome\.js[^>]*></script>\n?", "", text)
        text = text.replace(
            '<summary><span class="toctree-toggle"', '<summary aria-label="exercises"><span class="toctree-toggle"'
        )
        page.write_text(text, encoding="utf-8")
    static = out / "_static"
    for path in {*static.glob("*macros.html"), *static.glob("scripts/fontawesome*"), *static.rglob("*.map")}:
        path.unlink()
    shutil.rmtree(static / "locales", ignore_errors=True)  # the theme's words in other languages, for building only


def build(out, repository=""):
    """The whole site; -> the number of pages."""
    work = ROOT / "build" / "book"
    prepare(work, repository)
    env = dict(os.environ, BOOK=str(ROOT / "book"), BOOK_EXTRA=str(work / "extra"), BOOK_REPOSITORY=repository)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    shutil.rmtree(out, ignore_errors=True)
    drawing = subprocess.Popen([sys.executable, "-m", "book.sliders", str(work / "pictures")], env=env, cwd=ROOT)
    try:
        sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "auto", "-b", "html"]
        sphinx += ["-c", str(ROOT / "book"), "-d", str(work / "doctrees"), str(work / "source"), str(out)]
        done = subprocess.run(sphinx, env=env, cwd=ROOT)
        if done.returncode or drawing.wait():
            raise SystemExit(f"python -m book: stopped, its message is above; {out} is not complete")
    finally:
        if drawing.poll() is None:
            drawing.terminate()
    shutil.copytree(work / "pictures", out / "pictures", dirs_exist_ok=True)
    math_font(out)
    finish(out)
    (out / ".nojekyll").touch()  # GitHub's pages leave out folders with an underscore otherwise
    return len(list(out.rglob("*.html")))


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m book", description="Build the course as a site.")
    parser.add_argument("--out", default=str(ROOT / "build" / "site"), help="the folder to write; it is made anew")
    parser.add_argument("--repository", default="", help="OWNER/NAME on GitHub; without it, no page links there")
    args = parser.parse_args(argv)
    if args.repository and not re.fullmatch(r"[\w.-]+/[\w.-]+", args.repository):
        parser.error(f"expected OWNER/NAME as the repository and found {args.repository!r}")
    if absent := missing():
        print(
            f"python -m book: expected the site's packages and found no {', '.join(absent)}: `make site` installs them"
        )
        return 1
    start = time.perf_counter()
    try:
        number = build(Path(args.out).resolve(), args.repository)
    except pages.PageError as e:
        print(f"python -m book: {e}")
        return 1
    print(
        f"{number} pages in {args.out}, after {time.perf_counter() - start:.0f} s: open index.html there in a browser"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
