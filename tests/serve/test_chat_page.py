"""The chat page in a real browser."""

import json
import os
import shutil
import time

import pytest

from paddock.text.chat_template import tool_to_openai
from tests.serve.memorized_model import WEATHER

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"]
FLAGS += ["disable-background-networking", "disable-component-update"]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no browser on this machine; apt install chromium")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=[f"--{f}" for f in FLAGS])
        yield found
        found.close()


@pytest.fixture
def page(browser, live):
    found = browser.new_page(viewport={"width": 1000, "height": 760})
    complaints = []
    found.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    found.on("pageerror", lambda e: complaints.append(str(e)))
    found.on(
        "request",
        lambda r: (
            complaints.append(r.url)
            if live.url not in r.url and not r.url.startswith("data:")
            else None
        ),
    )
    found.goto(live.url)
    found.fill("#temperature", "0")
    yield found
    # The browser reports rejected requests itself, and one test provokes them.
    assert [c for c in complaints if "Failed to load resource" not in c] == []
    found.close()


def say(page, text):
    page.fill("#say", text)
    page.press("#say", "Enter")
    page.wait_for_selector(".facts >> nth=-1")
    page.wait_for_selector("#send:enabled")


def shot(page, name):
    """Save a screenshot if a folder for them is set."""
    if "PADDOCK_SHOTS" in os.environ:
        page.screenshot(path=f"{os.environ['PADDOCK_SHOTS']}/{name}.png")


def test_a_reply_with_folded_reasoning_and_probabilities(page):
    page.wait_for_selector("#model >> text=tiny, context 512 tokens")
    say(page, "Say hello.")
    assert page.inner_text(".assistant > .text") == "Hello there, friend!"
    assert not page.is_visible("details .text")
    page.click("summary")
    assert page.inner_text("details .text") == "A greeting."
    page.hover(".assistant > .text .token >> nth=0")
    rows = page.query_selector_all("#card div")
    assert len(rows) == 5
    assert page.inner_text("#card .chosen code") == '"Hello"'
    assert float(page.inner_text("#card .chosen b").rstrip("%")) > 90
    page.check("#shade")
    shot(page, "reply")


def test_thinking_can_be_switched_off(page):
    page.uncheck("#think")
    say(page, "Say hello.")
    assert page.query_selector("details") is None


def test_a_tool_call_is_shown_and_its_result_answered(page):
    page.click("#more")
    page.fill("#tools", json.dumps([tool_to_openai(WEATHER)]))
    say(page, "Weather in Oslo?")
    assert page.inner_text(".call code") == 'get_weather({"city": "Oslo", "days": 2})'
    page.fill(".call input", '{"t": 12}')
    shot(page, "call")
    page.click(".call button")
    page.wait_for_selector(".assistant:nth-of-type(3) .facts")
    page.wait_for_selector("#send:enabled")
    assert page.inner_text(".assistant:nth-of-type(3) > .text") == "12 C in Oslo."


def test_a_reply_can_be_stopped_and_the_chat_started_over(page, live, monkeypatch):
    runner = live.engines[0]._loop.runner
    run = runner.launch_step

    def slowly(*step):
        time.sleep(0.03)  # otherwise the reply may end before a busy browser clicks
        return run(*step)

    monkeypatch.setattr(runner, "launch_step", slowly)
    page.fill("#temperature", "2")
    page.evaluate(
        """() => { const make = request; request = () => ({...make(), ignore_eos: true}); }"""
    )
    page.fill("#say", "Count.")
    page.press("#say", "Enter")
    page.wait_for_selector(".assistant .token", state="attached")
    page.click("#stop")
    page.wait_for_selector(".facts")
    assert page.inner_text(".facts").startswith("stopped")
    live.settle()
    page.click("#fresh")
    assert page.query_selector(".turn") is None


def test_errors_are_shown_and_markup_stays_text(page):
    page.click("#more")
    page.fill("#most", "100000")
    page.fill("#say", "<img src=x onerror=alert(1)>")
    page.press("#say", "Enter")
    page.wait_for_selector(".turn.error")
    assert "maximum context length is 512" in page.inner_text(".turn.error")
    assert page.query_selector("main img") is None
    shot(page, "error")
