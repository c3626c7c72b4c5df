"""The dashboard as an operator meets it: a real endpoint, a real page, a real browser.

One test goes through a shift from beginning to end, because that is what an operator does; the
pictures that it takes on its way are in build/screenshots.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "build" / "screenshots"
pytestmark = pytest.mark.long

READY_S = 60
STOP_S = 30
ADMIN_KEY = "the-operators-key"
REWARD_CHART = 1  # names the preferences only; the first one's legend names styles that were seen
PAGES = ("Live", "Learning health", "Rollouts", "Versions", "Runs", "Controls")


@pytest.fixture(scope="module")
def chromium(load):
    """The browser's module, if there is a browser."""
    module = load(Path(__file__).with_name("browser.py"))
    if not (module.CHROMIUM and module.DRIVER):
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    return module


@pytest.fixture(scope="module")
def served(chromium, load, tiny_model, tmp_path_factory):
    """`online-sao serve` with a tiny model, a key for its controls and a checkpoint per update."""
    service = load(ROOT / "tests" / "service" / "conftest.py")
    endpoint = service.ServedEndpoint(
        tiny_model,
        tmp_path_factory.mktemp("served") / "run",
        *service.TINY_SETTINGS,
        "learner.checkpoint_every=1",
        "learner.checkpoint_keep=50",
        env={"ONLINE_SAO_ADMIN_KEY": ADMIN_KEY},
    )
    try:
        yield endpoint.start()
    finally:
        if endpoint.process is not None:
            endpoint.stop()


@pytest.fixture(scope="module")
def page_url(served, tmp_path_factory):
    """`online-sao dashboard` on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("dashboard")
    command = [sys.executable, "-m", "online_sao.cli", "dashboard", "--port", str(port)]
    command += ["--run-dir", str(served.run_dir), "--url", served.url, "--runs", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + READY_S
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, f"no page in {READY_S} s"
            try:
                if httpx.get(f"{url}/_stcore/health", timeout=5).is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def browser(chromium, page_url):
    opened = chromium.Browser(page_url)
    try:
        yield opened
    finally:
        opened.close()


def ask(served, count, first=0):
    for number in range(first, first + count):
        assert served.chat(f"Write about rain, number {number}.").status_code == 200


def confirm(browser, button, question, outcome):
    """A control asks once and then says what happened."""
    browser.press(button)
    browser.wait_for(question)
    browser.press("Yes")
    browser.wait_for(outcome)


@pytest.mark.engine
def test_an_operator_watches_a_shift_and_acts(served, browser):
    # Nothing yet: the page says what to do.
    browser.open("Live")
    browser.wait_for("Times in Europe/Berlin")
    browser.wait_for("No answer has been recorded yet. Cute is preferred. Send a first request")

    # Chats arrive; the page follows without being touched.
    ask(served, 6)
    browser.until(lambda: int(browser.tile("Version")) >= 6, "six updates on the page")
    assert browser.tile("Preferred since") == "Cute"
    assert browser.tile("Service") == "up"
    browser.until(
        lambda: "Cute" in browser.chart_texts(REWARD_CHART), "the band of the first preference"
    )
    assert "Chuunibyou" not in browser.chart_texts(REWARD_CHART)
    browser.picture(PICTURES / "1-live-before-the-switch.png")

    # Without the key no control works; with it the preference is switched.
    browser.open("Controls")
    browser.wait_for("The service refused the key")
    browser.enter("Admin key", ADMIN_KEY)
    browser.wait_for("Now: learning is on")
    browser.enter("Reward this style", "Chuunibyou")
    confirm(
        browser,
        "Switch the preference",
        "Reward Chuunibyou (of Academic, Cute, Chuunibyou) from now on?",
        "Chuunibyou is preferred since",
    )
    browser.picture(PICTURES / "2-controls-after-the-switch.png")
    key = {"Authorization": f"Bearer {ADMIN_KEY}"}
    assert served.get("/v1/preference", headers=key).json()["style"] == "chuunibyou"

    # The new band appears, and the sentence on top names it.
    browser.open("Live")
    browser.wait_for("Chuunibyou is preferred since")
    browser.until(lambda: "Cute" in browser.chart_texts(REWARD_CHART), "charts")
    browser.watch_charts()
    ask(served, 6, first=6)
    browser.until(
        lambda: "Chuunibyou" in browser.chart_texts(REWARD_CHART), "the band of the new preference"
    )
    browser.until(lambda: int(browser.tile("Version")) >= 12, "twelve updates on the page")
    browser.wait_for("Adapting to Chuunibyou since")
    watched = browser.watched()  # it was redrawn several times, and never went blank
    assert watched["charts"] == 3
    assert watched["frames"] > 10
    assert watched["missing"] == 0
    assert browser.tile("Preferred since") == "Chuunibyou"
    assert browser.tile("Learning machinery") == "too early to say"  # of twelve updates
    browser.picture(PICTURES / "3-live-after-the-switch.png")

    # Pause, resume, pin and roll back to before the switch: in the service and on the page.
    browser.open("Controls")
    browser.enter("Admin key", ADMIN_KEY)
    browser.wait_for("Now: learning is on, version 12 serves")
    confirm(browser, "Pause learning", "Pause learning?", "Learning is paused since")
    assert served.get("/v1/learning", headers=key).json()["paused"] is True
    confirm(browser, "Resume learning", "Resume learning?", "Learning goes on since")
    browser.enter("To version", "before Chuunibyou")
    confirm(
        browser,
        "Roll back",
        "Go back to version 6? What was learned after it is given up.",
        "The weights of version 6 serve again as version 13 since",
    )
    browser.picture(PICTURES / "4-controls-after-the-rollback.png")
    status = served.get("/v1/learning", headers=key).json()
    assert (status["weight_version"], status["serving_version"]) == (13, 13)
    browser.open("Versions")
    browser.picture(PICTURES / "5-versions-after-the-rollback.png")
    (rolled_back,) = [event for event in _events(served) if event["kind"] == "rollback"]
    assert (rolled_back["to"], rolled_back["made"]) == (6, 13)

    # Served to the end.
    assert served.chat("Still there?").status_code == 200


@pytest.mark.engine
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_can_be_read_by_everyone(browser, theme):
    """Text contrast, labels of fields and buttons, headings, alternatives of charts."""
    browser.look(1280, theme, height=3000)
    for page in PAGES:
        browser.open(page)
        browser.settle()
        assert browser.violations() == [], page


@pytest.mark.engine
def test_a_phone_shows_every_page_without_scrolling_sideways(browser):
    browser.look(390, "dark")
    for page in PAGES:
        browser.open(page)
        browser.picture(PICTURES / f"phone-{page.lower().replace(' ', '-')}.png")
        wide = browser.driver.execute_script(
            "return document.querySelector('[data-testid=stMain]').scrollWidth"
        )
        assert wide <= 390, page


def _events(served):
    from dashboard.queries import StoreReader

    reader = StoreReader(f"sqlite:///{served.run_dir}/store.sqlite")
    try:
        return [{"kind": event.kind, **event.data} for event in reader.events()]
    finally:
        reader.close()
