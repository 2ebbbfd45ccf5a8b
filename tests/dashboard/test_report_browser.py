"""The report page in a real browser: scripts and style sheets."""

import subprocess
from pathlib import Path
from shutil import which
from xml.etree import ElementTree

import pytest

from paddock.dashboard import write_comparison, write_report
from tests.dashboard.runs import of_class, words, write_run

CHROMIUM = which("chromium") or which("chromium-browser") or which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--window-size=400,900",
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
ACT = """<script>addEventListener("load", () => {
  const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
  const move = (share) => plot.dispatchEvent(
    new PointerEvent("pointermove", { clientX: box.left + share * box.width }));
  const readout = () => plot.querySelector(".readout").innerText.replace(/\\s+/g, " ");
  const log = [];
  move(0.49); log.push(readout());
  document.getElementById("smooth").click();
  move(0.49); log.push(readout());
  document.querySelector(".legend button").click();
  move(1); log.push(readout());
  plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
  log.push(String(plot.querySelector(".readout").hidden));
  say(log);
})</script>"""
SAY = """<script>const say = (log) => {
  document.querySelector("main").innerHTML = "";
  for (const line of log) document.querySelector("main").append(
    Object.assign(document.createElement("p"), { textContent: line, className: "log" }));
}</script>"""
MEASURE = """<script>addEventListener("load", () =>
  say([innerWidth, document.documentElement.scrollWidth]))</script>"""


def run_script(page: Path, script: str) -> list[str]:
    """The output of a script on the page, in a phone-sized window."""
    page.write_text(page.read_text().replace("</body>", f"{SAY}{script}</body>"))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={page}-profile", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    main = done.stdout[done.stdout.index("<main>") : done.stdout.index("</main>") + 7]
    return [words(line) for line in of_class(ElementTree.fromstring(main), "log")]


def test_the_readout_follows_the_pointer(tmp_path):
    losses = [8.0 - step / 50 for step in range(200)]
    run = write_run(tmp_path / "run", losses, held_out={200: 3.5})
    assert run_script(write_report(run), ACT) == [
        "9,800 tokens, step 98 loss 6.07 (6.06) val loss 3.5 at 20K",
        "9,800 tokens, step 98 loss 6.06 val loss 3.5 at 20K",
        "20K tokens, step 200 val loss 3.5",
        "true",
    ]


@pytest.mark.parametrize("pages", ["report", "comparison"])
def test_no_horizontal_scrolling_on_a_phone(tmp_path, pages):
    arms = {
        name: [write_run(tmp_path / f"{name[:2]}{seed}", [2.0, 1.0], seed=seed) for seed in (0, 1)]
        for name in ("an arm whose name is rather long, as names of arms are", "other")
    }
    page = write_comparison(arms, tmp_path / "comparison.html")
    if pages == "report":
        page = write_report(next(iter(arms.values()))[0])
    window, content = run_script(page, MEASURE)
    assert int(content) <= int(window) <= 500
