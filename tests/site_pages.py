"""The built site, looked at: `make site-test` builds it and runs this file, `make test` does not.

Its files are read as they are, then Chromium opens the pages from a server on this machine, as wide as a telephone, and
some once more in the dark, or without scripts. What a page asks of any other server is refused, and is a fault.
"""

import functools
import http.server
import json
import os
import re
import shutil
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE = Path(os.environ.get("SITE", ROOT / "build" / "site"))
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
CODE = [page for page in PAGES if page.startswith("sources/")]  # all alike: some are looked at for all
LOOKED_AT = [page for page in PAGES if page not in CODE] + CODE[::20]
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
TELEPHONE = {"width": 400, "height": 800}
MOST = 2_000_000  # bytes of a page, with all that it loads
SOLUTION = re.compile(r"### BEGIN SOLUTION.*?\n(.*?)\n[^\n]*### END SOLUTION", re.S)


class Page(HTMLParser):
    """What a page links to, loads and shows, and the anchors that it has."""

    def __init__(self, name):
        super().__init__(convert_charrefs=True)
        self.name, self.anchors, self.links, self.loads, self.unnamed, self.text = name, set(), [], [], [], []
        self.feed((SITE / name).read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        if tag == "a" and "href" in attrs:
            self.links.append(attrs["href"])
        if tag in ("script", "img", "iframe", "source") and attrs.get("src"):
            self.loads.append(attrs["src"])
        if tag == "link" and attrs.get("rel", "") in ("stylesheet", "icon", "preload", "preconnect", "dns-prefetch"):
            self.loads.append(attrs["href"])
        if tag == "img" and not (attrs.get("alt") or "").strip():
            self.unnamed.append(attrs.get("src"))

    def handle_data(self, data):
        self.text.append(data)


@functools.lru_cache(None)
def read(name):
    return Page(name)


def file_of(page, target):
    """The file below the site that a link or a picture of a page means."""
    path = unquote(target.split("#")[0].split("?")[0])
    return (SITE / page).parent.joinpath(path).resolve() if path else (SITE / page).resolve()


# The files


def test_the_whole_course_is_there():
    assert PAGES, f"expected the site in {SITE}: make site"
    for folder in ("notebooks", "exercises"):
        there = {p.stem for p in (ROOT / folder).glob("[0-9][0-9]_*.ipynb")}
        assert {Path(p).stem for p in PAGES if p.startswith(f"{folder}/")} - {"glossary"} == there
    listed = {file_of("index.html", link) for link in read("index.html").links}
    assert {(SITE / f"notebooks/{name}.html").resolve() for name in CHAPTERS} <= listed
    assert {f"reference/{name}.html" for name in ("kernels", "simt", "lab", "models")} <= set(PAGES)
    assert "Mistral-7B" in "".join(read("index.html").text)  # a row of the headline


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_nothing_comes_from_elsewhere(page):
    wrong = [load for load in read(page).loads if re.match(r"[a-z]+:|//", load) and not load.startswith("data:")]
    for target in read(page).links + read(page).loads:
        if re.match(r"[a-z]+:|//", target):
            continue
        file, anchor = file_of(page, target), unquote(target.partition("#")[2])
        if file.is_dir():
            file /= "index.html"
        if not file.is_file() or SITE.resolve() not in file.parents:
            wrong.append(target)
        elif (
            anchor
            and file.suffix == ".html"
            and anchor not in read(file.relative_to(SITE.resolve()).as_posix()).anchors
        ):
            wrong.append(target)
    assert wrong == [] and read(page).unnamed == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_small(page):
    files = {file_of(page, load) for load in read(page).loads} | {SITE / page}
    assert sum(file.stat().st_size for file in files if file.is_file()) < MOST


def test_no_stylesheet_asks_for_anything_elsewhere():
    for path in SITE.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text(encoding="utf-8")), path


def test_no_page_gives_a_solution_away():
    """No answer of two lines or more stands on any page, in the search's index neither."""
    every = "\n".join(" ".join("".join(read(page).text).split()) for page in PAGES)
    answers = []
    for path in sorted((ROOT / "solutions").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            answers += [" ".join(answer.split()) for answer in SOLUTION.findall("".join(cell["source"]))]
    long = [answer for answer in answers if len(answer) > 120]
    assert len(long) > 30 and [answer for answer in long if answer in every] == []
    assert "BEGIN SOLUTION" not in every and not (SITE / "solutions").exists()


# The pages, in a browser


@pytest.fixture(scope="module")
def address():
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("expected Chromium on this machine and found none")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def look(browser, address):
    """look(page, ...) -> an open page; at the end, neither the console nor the network may have had anything to say."""
    said, contexts = [], []

    def open_page(name, *, viewport=TELEPHONE, scheme="light", scripts=True):
        context = browser.new_context(viewport=viewport, color_scheme=scheme, java_script_enabled=scripts)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: m.type in ("error", "warning") and said.append(m.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        if scripts:  # where none run, none are fetched, and that is called a failure
            page.on("requestfailed", lambda request: said.append(f"failed: {request.url}"))
        page.on("response", lambda r: r.status >= 400 and said.append(f"{r.status}: {r.url}"))
        page.on("request", lambda r: r.url.startswith((address, "data:")) or said.append(f"elsewhere: {r.url}"))
        page.goto(f"{address}/{name}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def audit(page, quick=False):
    """What axe finds that is serious or worse, a line each."""
    from axe_playwright_python.sync_playwright import Axe

    where = {"exclude": [[".highlight"]]} if quick else None  # thousands of words of code, in a few colours
    found = (
        Axe().run(page, context=where, options={"preload": False, "resultTypes": ["violations"]}).response["violations"]
    )
    return [
        f"{v['id']}, {len(v['nodes'])} times: {v['help']}, as in {v['nodes'][0]['html'][:160]}"
        for v in found
        if v["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("page", LOOKED_AT)
def test_a_page_on_a_telephone(page, look):
    opened = look(page)
    opened.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
    opened.wait_for_function("[...document.images].every(i => i.complete)")
    empty = opened.evaluate("[...document.images].filter(i => !i.naturalWidth && i.offsetParent).map(i => i.src)")
    assert empty == []
    assert opened.evaluate("document.documentElement.scrollWidth") <= TELEPHONE["width"]
    formulas = opened.evaluate(
        "[...document.querySelectorAll('math')].filter(m => m.checkVisibility()).map(m =>"
        " [m.getBoundingClientRect().width, !!m.querySelector('merror'), m.textContent])"
    )
    assert [text for width, broken, text in formulas if width <= 0 or broken or "\\" in text] == []
    assert audit(opened, quick=True) == []


WIDE = {"width": 1400, "height": 900}


@pytest.mark.parametrize("page", ["index", "notebooks/04_warp_gemv", "exercises/11_ssd_math", "reference/kernels"])
def test_a_page_in_the_dark_and_wide(page, look):
    opened = look(f"{page}.html", viewport=WIDE, scheme="dark")
    assert opened.evaluate("document.documentElement.dataset.theme") == "dark"
    assert (
        sum(map(int, re.findall(r"\d+", opened.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])) < 200
    )
    assert audit(opened) == []


def test_without_scripts_all_is_there(look):
    opened = look("notebooks/04_warp_gemv.html", scripts=False)
    picture = opened.locator(".slider img")
    picture.scroll_into_view_if_needed()
    assert picture.is_visible() and opened.locator(".slider .still").is_visible()
    assert opened.locator(".slider input").is_hidden()
    assert opened.locator("a.term").first.get_attribute("title")
    assert opened.locator("article h1").is_visible() and opened.locator("math").first.is_visible()


def test_a_slider_moves_its_picture(look):
    opened = look("notebooks/04_warp_gemv.html", viewport=WIDE)
    slider, picture = opened.locator(".slider input"), opened.locator(".slider img")
    before = picture.get_attribute("src")
    slider.focus()
    opened.keyboard.press("ArrowRight")
    after = picture.get_attribute("src")
    assert after != before and opened.locator(".slider output").inner_text() == "3"
    opened.locator(".slider select").select_option("1")
    assert picture.get_attribute("src") not in (before, after)
    opened.wait_for_function("document.querySelector('.slider img').naturalWidth > 0")


def test_every_setting_of_every_slider_has_its_picture():
    for page in PAGES:
        text = (SITE / page).read_text(encoding="utf-8")
        for start, controls in re.findall(r'data-pictures="([^"]+)"><div class="controls"[^>]*>(.*?)</div><img', text):
            counts = [
                len(json.loads(t.replace("&quot;", '"'))) if t else c.count("<option") for t, c in settings(controls)
            ]
            names = [""]
            for count in counts:
                names = [f"{name}{'-' * bool(name)}{i}" for name in names for i in range(count)]
            assert names and [n for n in names if not file_of(page, f"{start}{n}.png").is_file()] == []


def settings(controls):
    return [((re.search(r'data-texts="([^"]*)"', c) or [0, ""])[1], c) for c in controls.split('class="control"')[1:]]


def test_a_word_of_the_glossary_is_explained_in_place(look):
    opened = look("notebooks/04_warp_gemv.html", viewport=WIDE)
    word = opened.locator("a.term").first
    word.hover()
    tip = opened.locator("[role=tooltip]")
    assert len(tip.inner_text()) > 40
    opened.keyboard.press("Escape")
    assert tip.count() == 0
    word.click()
    opened.wait_for_url("**/notebooks/glossary.html#*")


def test_the_search_finds(look):
    opened = look("search.html?q=swizzle", viewport=WIDE)
    opened.wait_for_selector("#search-results li a", timeout=20_000)
    assert any("14" in text for text in opened.locator("#search-results li").all_inner_texts())
