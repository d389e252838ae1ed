"""The page of a report: what its source says, and what a real browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from ropext.report.page import page
from tests.test_report import GAPS, PROTOCOL, figure, lineage, measurement, scores

SECTIONS = [
    "In short",
    "Perplexity by length",
    "Loss by position",
    "Does more context help?",
    "Retrieval",
    "Other tasks",
    "Rotary frequencies",
    "Protocol and provenance",
]
LENT = {"href": ("link", "use"), "src": (), "xlink:href": ("use",)}  # attributes that fetch, and who may have them


class Source(HTMLParser):
    """Every tag with its attributes, and the text outside style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def inside(self, tag: str) -> list[str]:
        return [text for around, text in self.texts if around == tag]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def text() -> str:
    return page(lineage())


@pytest.fixture(scope="module")
def source(text) -> Source:
    return Source(text)


def test_every_section_has_its_heading_and_every_figure_its_caption(source):
    assert source.inside("h1") == ["tuned against source"]
    assert source.inside("h2") == SECTIONS
    assert len(source.all("figcaption")) == len(source.all("figure"))
    assert {cell["scope"] for cell in source.all("th")} == {"col", "row"}
    drawings = source.all("svg")
    assert len(drawings) == 4 and all(one["role"] == "img" for one in drawings)
    titles = {"Perplexity by length", "Loss by position", "Loss of the last 512 tokens by context"}
    assert titles | {"Wavelength by pair", "ropext: tuned against source"} == set(source.inside("title"))


def test_a_section_without_figures_is_left_out():
    bare = Source(page(measurement([scores("source", [figure(512, 3.0)], losses=())])))
    assert bare.inside("h2") == ["In short", "Perplexity by length", "Protocol and provenance"]
    tasks = replace(lineage().models[0], results=(), by_position=(), by_context=(), rope=None)
    assert Source(page(measurement([tasks]))).inside("h2") == [SECTIONS[n] for n in (0, 4, 5, 7)]


def test_nothing_in_the_source_points_outside_or_runs(text, source):
    assert not source.all("script") and not source.all("iframe") and not source.all("img")
    for tag, attributes in source.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name in LENT:
                assert tag in LENT[name] and str(value).startswith(("#", "data:,")), f"<{tag} {name}={value}>"
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?([^)]*)", text))


def test_names_within_the_page_are_given_once_and_lead_somewhere(text, source):
    names = [attributes["id"] for _, attributes in source.tags if "id" in attributes]
    assert len(names) == len(set(names))
    asked = re.findall(r'(?:url\(#|href="#)([^")]+)', text) + [
        attributes["aria-labelledby"] or "" for _, attributes in source.tags if "aria-labelledby" in attributes
    ]
    assert asked and set(asked) <= set(names)


def test_colours_of_plots_are_those_of_the_page(text):
    drawn = "".join(re.findall("<svg.*?</svg>", text, flags=re.DOTALL))
    colours = set(re.findall(r"(?:fill|stroke): ?([^;\"]+)", drawn))
    assert {"var(--ink)", "var(--line)", "var(--s0)", "var(--s1)", "var(--s2)"} <= colours
    assert all(colour == "none" or colour.startswith("var(--") for colour in colours), colours
    assert text.count("--s7:") == 2 and text.count("--ink:") == 2, "light and dark define each"


def test_a_plot_names_its_lengths_whatever_they_are():
    drawn = page(measurement([scores("source", [figure(1000, 3.0)], losses=())]))
    assert Source(drawn[drawn.index("<svg") :]).inside("text")[:2] == ["1000", "length (tokens)"]


def test_every_figure_of_the_protocol_and_every_model_is_there(source):
    cells = source.inside("td")
    for value in (
        "truncated",
        "consecutive windows",
        "8192 tokens",
        "the corpus",
        PROTOCOL.data_hash,
        "float32",
        "cpu",
    ):
        assert value in cells
    assert "ropext 0.1.0, torch 2.13.0, transformers 5.24.0" in cells
    assert "samples 100, seed 0, threshold 0.9" in cells
    for scores_ in lineage().models:
        assert scores_.model in cells and scores_.weights_sha256 in cells
    assert "source: 8192 tokens are beyond its window of 2048" in source.inside("li")


def test_a_heat_map_has_its_number_in_every_cell(source):
    shades = [attributes["style"] for attributes in source.all("td") if "style" in attributes]
    assert len(shades) == 3 * 5 * 3
    assert shades.count("--share:8%") == 5 and source.inside("td").count("0.08") == 5 + 1


def test_the_frequencies_stand_side_by_side_with_their_ratio(source):
    cells = source.inside("td")
    start = cells.index(f"{lineage().models[0].rope.wavelengths[31]:.1f}")
    assert cells[start + 2] == f"{4.18293659 ** (62 / 64):.3f}"


def test_gaps_and_regressions_are_told_in_words():
    listed = Source(page(GAPS)).inside("li")
    assert "768 (tuned): failed: the loss at position 600 is not a finite number." in listed
    assert "regression: worse than source" in Source(page(lineage())).inside("p")
    assert Source(page(GAPS)).inside("p").count("not measured") == 2


def test_labels_paths_and_notes_are_text_and_nothing_else():
    hostile = '<script>alert(1)</script>"><img src=//x.example onerror=alert(1)>'
    one = scores(hostile, [figure(512, 3.0, status=hostile)], model=hostile, notes=(hostile,), weights_sha256=hostile)
    text = page(replace(measurement([one, replace(one, label="$x_")]), protocol=replace(PROTOCOL, data=hostile)))
    found = Source(text)
    assert not found.all("script") and not found.all("img")
    assert hostile in found.inside("h1")[0] + "".join(found.inside("th")) and hostile in found.inside("td")


def test_a_report_of_three_models_is_small_and_always_the_same(text):
    assert len(text.encode()) < 400_000
    assert page(lineage()) == text


# In a browser, whose every request goes through a server here. Chromium asks for addresses of its makers too: what the
# page itself loads, from anywhere, is what the browser's own record of the page says.

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
DARK, LIGHT = 0, 1  # Blink's numbers for prefers-color-scheme
MEASURE = """<!doctype html><meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<iframe src="/report.html" width="WIDTH" height="900" style="border: 0"></iframe><pre></pre><script>
const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const rgba = colour => {
  pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data];
};
const luminance = colour => rgba(colour).slice(0, 3).map(part => part / 255)
  .map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
  .reduce((sum, part, i) => sum + part * [.2126, .7152, .0722][i], 0);
const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + .05) / (low + .05);
};
document.querySelector("iframe").onload = event => {
  const view = event.target.contentWindow, page = view.document, root = page.documentElement;
  const style = element => view.getComputedStyle(element);
  const behind = element => rgba(style(element).backgroundColor)[3] ? style(element).backgroundColor
    : behind(element.parentElement);
  const texts = [], walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || element.tagName === "title") continue;
    const ink = element.closest("svg") ? style(element).fill : style(element).color;
    texts.push([contrast(ink, behind(element)), walk.currentNode.data.trim().slice(0, 40)]);
  }
  const lines = [0, 1, 2, 3, 4, 5, 6, 7].map(n => style(root).getPropertyValue("--s" + n).trim());
  document.querySelector("pre").textContent = JSON.stringify({
    width: root.clientWidth, needed: root.scrollWidth, texts: texts.length, paper: style(page.body).backgroundColor,
    faintest: texts.sort((a, b) => a[0] - b[0])[0],
    line: Math.min(...lines.map(one => contrast(one, behind(page.body)))),
    loaded: view.performance.getEntriesByType("resource").map(entry => entry.name),
    boxes: [...page.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth).length,
  });
};
</script>"""


class Site(BaseHTTPRequestHandler):
    """A proxy that knows one site and notes what is asked for."""

    pages: ClassVar[dict[str, str]] = {}
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        body = self.pages.get(self.path.removeprefix("http://report.test"), "").encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_CONNECT(self):
        self.asked.append(self.path)
        self.send_error(502)

    def log_message(self, *args):
        pass


@contextmanager
def served(pages: dict[str, str]) -> Iterator[tuple[int, list[str]]]:
    handler = type("OneSite", (Site,), {"pages": pages, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, handler.asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def browse(path: str, pages: dict[str, str], profile: Path, *options: str) -> tuple[str, list[str]]:
    """The DOM that Chromium makes of http://report.test/`path`, and what it asked that site for."""
    with served(pages) as (port, asked):
        command = [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={profile}", f"--proxy-server=http://127.0.0.1:{port}", "--hide-scrollbars"),
            *(*options, "--dump-dom", f"http://report.test/{path}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [address for address in asked if address.startswith("http://report.test/")]


def measured(text: str, profile: Path, scheme: int, width: int) -> dict:
    pages = {"/report.html": text, "/measure.html": MEASURE.replace("WIDTH", str(width))}
    options = (f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1300,1000")
    found = re.search("<pre>(.+?)</pre>", browse("measure.html", pages, profile, *options)[0])
    assert found, "the page did not load"
    return json.loads(unescape(found[1]))


@in_a_browser
def test_a_browser_shows_every_section_and_the_page_asks_for_nothing_else(text, tmp_path):
    dom, asked = browse("report.html", {"/report.html": text}, tmp_path / "whole")
    assert Source(dom).inside("h2") == SECTIONS and len(Source(dom).all("svg")) == 4
    assert asked == ["http://report.test/report.html"]
    assert measured(text, tmp_path / "clean", LIGHT, 1200)["loaded"] == []


@in_a_browser
def test_the_policy_of_the_page_forbids_what_a_mistake_would_ask_for(text, tmp_path):
    leaky = text.replace("</main>", '<img src="http://report.test/x.png"></main>')
    assert "http://report.test/x.png" not in browse("report.html", {"/report.html": leaky}, tmp_path / "shut")[1]
    open_ = re.sub('<meta http-equiv="Content-Security-Policy".*?>', "", leaky, count=1)
    assert "http://report.test/x.png" in browse("report.html", {"/report.html": open_}, tmp_path / "open")[1]
    assert measured(open_, tmp_path / "seen", LIGHT, 1200)["loaded"] == ["http://report.test/x.png"]


@in_a_browser
@pytest.mark.parametrize("width", [380, 1200])
def test_the_page_is_as_wide_as_its_window_and_read_in_light_and_dark(text, tmp_path, width):
    light = measured(text, tmp_path / "light", LIGHT, width)
    dark = measured(text, tmp_path / "dark", DARK, width)
    assert light["paper"] == "rgb(255, 255, 255)" and dark["paper"] == "rgb(13, 17, 23)"
    for found in (light, dark):
        assert found["width"] == found["needed"] == width
        assert found["texts"] > 300 and found["faintest"][0] >= 4.5, found["faintest"]
        assert found["line"] >= 3
    assert (light["boxes"] > 0) == (width == 380), "wide tables scroll in their own box"
