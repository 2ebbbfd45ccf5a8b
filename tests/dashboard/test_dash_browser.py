"""The dashboard in a real browser: from the list of runs to one token, nothing external."""

import os
import socket
import threading
from shutil import which

import pytest
import uvicorn

from paddock.cli.dash import open_token_text
from paddock.dashboard.app import DashboardApp, build_app
from paddock.dashboard.run_index import RunIndex
from tests.dashboard.ledgers import HOSTILE, write_rl_run
from tests.dashboard.runs import write_run

CHROMIUM = which("chromium") or which("chromium-browser") or which("google-chrome")
FLAGS = ["no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"]
FLAGS += ["disable-background-networking", "disable-component-update"]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_rl_run(folder / "rl")
    write_run(folder / "base", [3.0 - step / 40 for step in range(100)])
    app = build_app(DashboardApp(run_index=RunIndex([folder]), open_token_text=open_token_text))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=[f"--{f}" for f in FLAGS])
        yield found
        found.close()


@pytest.fixture
def scheme():
    return "light"


@pytest.fixture
def page(browser, url, scheme):
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    found = context.new_page()
    complaints = []
    found.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    ours = (url, "data:", "blob:")
    found.on("request", lambda r: None if r.url.startswith(ours) else complaints.append(r.url))
    found.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
    found.goto(url)
    yield found
    assert complaints == []
    context.close()


PATIENCE_MS = 120_000  # cores may be busy with other tests
DRAWN = """name => {
  const { ready, address } = document.getElementById("main").dataset;
  return ready === name && address === location.hash;
}"""


def arrived(page, name):
    """Wait until the page of the current address is drawn; the address changes first."""
    page.wait_for_function(DRAWN, arg=name, timeout=PATIENCE_MS)
    if "PADDOCK_SHOTS" in os.environ:  # for manual inspection
        page.wait_for_timeout(400)
        night = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        folder = os.environ["PADDOCK_SHOTS"]
        page.screenshot(path=f"{folder}/{name}{'-dark' * night}.png", full_page=True)


def press(page, shape):
    """Click a shape of a chart; a transparent layer above it takes the event."""
    shape.scroll_into_view_if_needed()
    box = shape.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x - 2, y)
    page.mouse.move(x, y)
    page.mouse.click(x, y)


def go(page, tab):
    page.click(f"#tabs >> text={tab}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_from_the_list_of_runs_to_one_token(page, tmp_path):
    arrived(page, "runs")
    assert page.locator("tr[data-run]").count() == 2
    assert page.locator(".curves .scatterlayer .trace").count() == 1  # only one has a reward
    page.click("tr[data-run=rl] td:nth-child(2) a")

    arrived(page, "rollouts")
    assert page.inner_text(".tiles div:nth-child(2) dd") == "1"
    bars = page.locator(".barlayer .point path")
    page.wait_for_selector(".barlayer .point path")
    assert bars.count() == 20
    press(page, bars.first)  # rollouts with reward zero
    page.wait_for_url("**low=**")
    arrived(page, "rollouts")
    assert page.locator("a.group").all_inner_texts() == ["words 0"]
    page.click("a.group")

    arrived(page, "group")
    assert page.locator(".card").count() == 4
    assert page.inner_text(".message.user p") == f"Say {HOSTILE} twice."
    card = page.locator(".card").nth(1)
    thought = card.locator(".reasoning p").first
    assert not thought.is_visible()
    card.locator(".reasoning summary").first.click()
    assert thought.inner_text() == "It wants a look."
    assert card.locator(".call").inner_text() == f"look(key = {HOSTILE})"
    assert card.locator("pre.result").inner_text() == "seen <b>it</b>"
    card.locator(".to-tokens").click()

    arrived(page, "tokens")
    token = page.locator(".tokens span.sampled").nth(3)
    token.click()
    fields = dict(
        zip(
            page.locator(".token-card dt").all_inner_texts(),
            page.locator(".token-card dd").all_inner_texts(),
            strict=True,
        )
    )
    assert fields["log-probability"] == "-0.375"
    assert fields["probability"] == "68.73 %"
    assert fields["importance ratio"] == "1.28403"
    assert fields["advantage"] == "1"
    assert fields["mask"] == "trained, clipped or masked"
    paints = {}
    for way in ("log-probability", "advantage", "importance ratio", "mask"):
        page.click(f".ways >> text={way}")
        paints[way] = token.evaluate("span => getComputedStyle(span).backgroundColor")
    assert len(set(paints.values())) >= 3, paints
    assert "dropped" in token.get_attribute("class")
    page.keyboard.press("Tab")
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".token-card dd >> nth=3") == "-0.5"
    page.screenshot(path=tmp_path / "token.png")
    assert (tmp_path / "token.png").stat().st_size > 20_000
    assert page.locator("main img, main b b, main script").count() == 0


def test_the_other_pages(page):
    arrived(page, "runs")
    page.click("tr[data-run=rl] >> text=timeline")
    arrived(page, "timeline")
    page.wait_for_selector(".barlayer .point path")
    assert page.locator(".barlayer .point path").count() == 12
    assert "11 spans" in page.inner_text(".tiles")
    press(page, page.locator(".barlayer .point path").first)
    arrived(page, "tokens")

    go(page, "tasks")
    arrived(page, "tasks")
    states = page.locator("table >> nth=0").locator("tbody tr")
    assert states.locator("td:nth-child(2)").all_inner_texts() == [
        "running",
        f"disabled: all {HOSTILE}",
        "removed",
    ]
    assert states.locator("td:nth-child(7)").all_inner_texts() == ["75 %", "-", "-"]
    slow = page.locator("table >> nth=1").locator("tbody td").all_inner_texts()
    assert slow == ["words-3-1", "words", "1 min 35 s", "4 s", "23.8"]

    go(page, "failures")
    arrived(page, "failures")
    assert f"disk full {HOSTILE}" in page.inner_text("table >> nth=0")

    go(page, "engine")
    arrived(page, "engine")
    page.wait_for_selector(".iciclelayer .slice")
    assert page.locator("figure").count() == 4
    assert page.locator(".iciclelayer .slice").count() > 3
    assert page.locator(".acceptance .barlayer .point").count() == 1

    go(page, "network")
    arrived(page, "network")
    assert page.locator(".heatmaplayer image").count() == 2
    assert page.locator(".picked span").all_inner_texts() == ["a", "b", "<c>", "d", "e"]
    assert "2 x" in page.inner_text(".tiles")


def test_metrics_can_be_selected_and_curves_overlaid(page):
    arrived(page, "runs")
    page.select_option("select >> nth=0", "loss")
    page.wait_for_selector(".curves .ytitle >> text=nats/token")
    page.select_option("select >> nth=0", "reward")
    page.select_option("select >> nth=1", "tokens")
    page.wait_for_selector(".curves .xtitle >> text=tokens")
    page.check("[aria-label='plot rl']")
    assert page.locator(".curves .legendtext").all_text_contents() == ["rl"]


def test_missing_pages_show_an_error_and_reports_are_linked(browser, url):
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{url}/#/rollouts?run=nothing")
    page.wait_for_selector(".note")
    assert "run 'nothing' not found" in page.inner_text(".note")
    page.goto(f"{url}/#/engine?run=rl")
    arrived(page, "engine")
    page.click("#tabs >> text=report")
    page.wait_for_selector("h1")
    assert "rl" in page.inner_text("h1")
    page.hover(".plot >> nth=0")
    assert page.locator(".readout >> nth=0").is_visible()  # only its own script may run
    context.close()


def test_no_horizontal_scrolling_on_a_phone(browser, url):
    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = context.new_page()
    for name, query in (
        ("runs", ""),
        ("rollouts", "rollouts?run=rl"),
        ("group", "group?run=rl&ordinal=0"),
        ("tokens", "tokens?run=rl&ordinal=0&rollout=1"),
        ("timeline", "timeline?run=rl"),
        ("engine", "engine?run=rl"),
        ("network", "network?run=rl"),
    ):
        page.goto(f"{url}/#/{query}")
        arrived(page, name)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, name
    context.close()
