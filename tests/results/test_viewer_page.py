"""The trace viewer in a real browser: what a reader sees, without a server."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.results.viewer import fragment
from tests.results.traced import toy_run

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver on the PATH"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1300,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """The viewer over some runs, open in a browser."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.browser, self.url = browser, path.as_uri()
        browser.get_log("browser"), browser.get_log("performance")
        browser.get(self.url)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.browser.find_elements("css selector", selector)
        return found

    def one(self, selector: str) -> Any:
        self.until(lambda: self.all(selector))
        return self.all(selector)[0]

    def until(self, holds: Callable[[], Any]) -> None:
        """Wait for something that the page does later."""
        end = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < end, "the page did not get there"
            time.sleep(0.02)

    def choose(self, name: str, value: str) -> None:
        """Pick an option of a selection, as a user does."""
        self.one(f"#tv-{name}").find_element("css selector", f'option[value="{value}"]').click()

    def press(self, key: str) -> None:
        self.one("#tv-lanes").send_keys(key)

    def current(self, selector: str = "") -> list[Any]:
        return self.all(f".tv-step[aria-current] {selector}".strip())

    def fates(self) -> list[str]:
        return [cell.get_attribute("data-fate") for cell in self.current(".tv-cell")]

    @property
    def output(self) -> str:
        text: str = self.one(".tv-output").get_property("textContent")
        return text

    def tip(self) -> dict[str, str]:
        """The tooltip's lines by name."""
        names, values = self.all("#tv-tip dt"), self.all("#tv-tip dd")
        return {name.text: value.text for name, value in zip(names, values, strict=True)}

    def addresses(self) -> list[str]:
        """Where the page has sent requests."""
        messages = (json.loads(each["message"]) for each in self.browser.get_log("performance"))
        events = [each["message"] for each in messages]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Callable[..., Page]:
    def opened(*detail: bool) -> Page:
        folders = [toy_run(tmp_path / f"run-{i}", each) for i, each in enumerate(detail)]
        path = tmp_path / "page.html"
        head = "<!doctype html><meta charset=utf-8><title>runs</title><link rel=icon href=data:,>"
        path.write_text(head + fragment(folders), encoding="utf-8")
        page = Page(browser, path)
        page.until(lambda: page.all(".tv-step"))
        return page

    return opened


def test_a_reader_walks_through_a_request(open_page: Callable[..., Page]) -> None:
    page = open_page(True)
    assert page.one(".tv-head h4").text == "vllm"
    assert page.fates() == ["own"]
    assert page.output == "a"
    page.press("\ue014")  # arrow right
    assert page.fates() == ["accepted", "trimmed", "trimmed", "bonus"]
    assert page.output == "ab\n"
    page.press("\ue012")  # arrow left
    assert page.output == "a"
    page.press("\ue010")  # end
    assert page.output == "ab\nc"


def test_another_request_is_a_key_or_a_choice_away(open_page: Callable[..., Page]) -> None:
    page = open_page(True)
    page.press("\ue015")  # arrow down
    page.until(lambda: "ended by length" in page.one(".tv-head span").text)
    assert page.one("#tv-request").get_property("value") == "1"
    page.press("\ue013")  # arrow up
    page.until(lambda: "ended by stop" in page.one(".tv-head span").text)
    page.choose("request", "1")
    page.until(lambda: "ended by length" in page.one(".tv-head span").text)


def test_a_token_tells_what_is_known_of_it(open_page: Callable[..., Page]) -> None:
    page = open_page(True)
    page.press("\ue014")
    accepted, trimmed, _, bonus = page.current(".tv-cell")
    page.browser.execute_script("arguments[0].focus()", accepted)
    tip = page.tip()
    assert tip["token"] == "b"
    assert tip["id"] == "2"
    assert tip["fate"] == "accepted draft"
    assert tip["p"] == "1"  # the grammar leaves no other
    assert tip["q"] == "none (the draft model's argmax)"
    assert tip["legal tokens"] == "1"
    assert tip["step, µs"].startswith("draft ")
    assert tip["rolled back"] == "1 token, preview, in 1 call"
    webdriver.ActionChains(page.browser).move_to_element(bonus).perform()
    assert page.tip()["token"] == "⏎"
    webdriver.ActionChains(page.browser).move_to_element(trimmed).perform()
    assert page.tip()["p, q, legal"] == "none: it was not verified"


def test_two_strategies_stand_side_by_side(open_page: Callable[..., Page]) -> None:
    page = open_page(True)
    page.choose("beside", "sglang")
    page.until(lambda: len(page.all(".tv-lane")) == 2)
    assert [each.text for each in page.all(".tv-head h4")] == ["vllm", "sglang"]
    page.press("\ue014")
    assert len(page.current()) == 2
    assert page.fates()[4:6] == ["replaced", "reencoded"]
    assert len(page.all(".tv-depth")) > 0


def test_without_detail_the_page_says_how_to_get_it(open_page: Callable[..., Page]) -> None:
    page = open_page(False, True)
    assert "engine.detail=true" in page.one("#tv-notice").text
    page.browser.execute_script("arguments[0].focus()", page.current(".tv-cell")[0])
    assert page.tip()["p, q, legal"] == "not recorded (engine.detail=true)"
    page.choose("run", "1")
    page.until(lambda: "not for quoting" in page.one("#tv-notice").text)


def test_nothing_leaves_the_page_and_nothing_fails(open_page: Callable[..., Page]) -> None:
    page = open_page(True)
    for strategy in ("plain", "trtllm", "sglang"):
        page.choose("strategy", strategy)
        page.until(lambda name=strategy: page.one(".tv-head h4").text == name)
    assert {url for url in page.addresses() if not url.startswith("data:")} == {page.url}
    assert page.browser.get_log("browser") == []
