from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from harness.results import figures
from harness.results.page import comparison_page, inline, run_page
from harness.results.palette import INK
from harness.results.side_by_side import labelled
from tests.results import tiny_run
from tests.results.folders import tiny_folder

VOID = {"meta", "br", "hr", "img", "input", "link", "col", "wbr"}


class Outline(HTMLParser):
    """Ids, ends that fit no start, and elements that load something."""

    def __init__(self, text):
        super().__init__()
        self.open, self.misnested, self.loads, self.ids = [], [], [], Counter()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids[value] += 1
            if name in ("src", "href", "xlink:href") and not value.startswith(("#", "data:")):
                self.loads.append((tag, value))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.misnested.append(tag)


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "tiny")


@pytest.fixture
def page(folder):
    return run_page(folder)


def test_the_page_loads_nothing(page):
    assert Outline(page).loads == []
    assert not re.search(r"@import|url\((?!['\"]?(#|data:))", page)
    assert "<link" not in page


def test_elements_are_nested_and_ids_unique(page):
    outline = Outline(page)
    assert outline.misnested == outline.open == []
    assert [name for name, number in outline.ids.items() if number > 1] == []


def test_references_inside_a_figure_point_into_it(page):
    outline = Outline(page)
    targets = set(re.findall(r"(?:url\(#|xlink:href=\"#)([\w.-]+)", page))
    assert targets
    assert targets <= set(outline.ids)


def test_the_answer_comes_first_then_where_it_holds(page):
    order = [
        "<h1>tiny</h1>",
        "vllm is fastest here",
        "Toy CPU, 4 cores",
        "python -m harness &#39;workload.kinds",
        "<caption>Acceptance</caption>",
        "<svg",
        "<caption>Fill times</caption>",
        "Failed requests",
    ]
    places = [page.index(each) for each in order]
    assert places == sorted(places)


def test_all_six_figures_are_in_the_page(page):
    assert page.count("<figure>") == 6


def test_the_row_of_the_fastest_is_marked_in_each_comparison(page):
    marked = re.findall(r'<tr class="marked">\s*<th scope="row">(\w+)</th>', page)
    assert marked == ["vllm", "vllm", "vllm"]


def test_what_requests_say_is_text_and_no_markup(tmp_path):
    steps, requests = tiny_run()
    requests["error"] = requests["error"].replace("no token is legal", "<b>no</b>")
    text = run_page(tiny_folder(tmp_path / "run", steps, requests))
    assert "&lt;b&gt;no&lt;/b&gt;" in text
    assert "<b>no</b>" not in text


def test_text_and_axes_of_a_figure_take_the_colour_of_the_page(folder):
    drawn = figures.time_split(folder.steps())
    assert INK in figures.svg(drawn)
    text = inline(drawn, "figure0")
    assert INK not in text
    assert "currentColor" in text


def test_a_figure_does_not_style_the_page_around_it(folder):
    text = inline(figures.time_split(folder.steps()), "figure0")
    assert text.startswith("<svg")
    assert "<style" not in text
    assert "<metadata" not in text


def test_the_page_knows_light_and_dark(page):
    assert '<meta name="color-scheme" content="light dark">' in page
    assert "@media (prefers-color-scheme: dark)" in page


def test_figures_do_not_grow_with_the_number_of_requests(tmp_path):
    steps, _ = tiny_run()
    size = len(figures.svg(figures.rollback_depths(steps)))
    many = steps.loc[steps.index.repeat(50)].reset_index(drop=True)
    assert len(figures.svg(figures.rollback_depths(many))) == pytest.approx(size, rel=0.05)
    assert size < 100_000


def test_several_runs_share_one_page_with_an_answer_each(folder, tmp_path):
    text = comparison_page(labelled([folder, tiny_folder(tmp_path / "other")]))
    assert "<h1>2 runs side by side</h1>" in text
    assert "tiny: vllm is fastest here" in text
    assert "other: vllm is fastest here" in text
    assert text.count("<figure>") == 1
    outline = Outline(text)
    assert outline.misnested == outline.open == outline.loads == []


def test_a_run_that_failed_altogether_still_has_a_page(tmp_path):
    steps, requests = tiny_run()
    failed = requests[requests["request"] == "c"]
    text = run_page(tiny_folder(tmp_path / "run", steps.head(0), failed))
    assert "there is nothing to compare" in text
    assert "no token is legal" in text
