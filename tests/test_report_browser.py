"""The report in a real headless Chromium: it renders, obeys its controls, loads nothing and runs nothing foreign."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qpt.report import write_report
from report_samples import run_folder, table
from test_report import hostile_runs

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = os.environ.get("QPT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium here; install one with the system's packages")
    with playwright.sync_playwright() as engine:
        # Without a sandbox: containers have no right to make one, and the page is our own.
        found = engine.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks, two methods, three limits, runs with learning curves, a calibration."""
    folder = tmp_path_factory.mktemp("report")
    rows = [(s, {10.0: (s * 1.0, 9.0), 20.0: (s * 2.0, 25.0)}) for s in (100, 200)]
    paths: list[Path] = []
    for seed in range(2):
        run = run_folder(folder / f"qpt{seed}", seed=seed, evaluations=rows)
        values = {10.0: ([300, 310, 320], [8, 9, 14]), 20.0: ([500, 510, 520], [18, 19, 20])}
        table(values, fallback=0.1 + seed / 10).save(run / "episodes.csv")
        paths.append(run)
    (paths[0] / "calibration.csv").write_text("cost_limit,predicted_cost,realised_cost\n10,3,8\n20,11,19\n")
    other = table({10.0: ([900] * 4, [50, 51, 52, 60])}, algorithm="bold", checkpoint="")
    paths.append(other.save(folder / "bold.csv"))
    away = table({40.0: ([7] * 4, [1, 2, 3, 4])}, task="CarRun", algorithm="bold", checkpoint="")
    paths.append(away.save(folder / "away.csv"))
    return write_report(paths, folder / "report.html")[0]


class Watched:
    """A page, with what it asked for and complained about."""

    def __init__(self, browser: Any, path: Path, size: dict[str, int] = DESKTOP, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport=size, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.url = path.as_uri()
        self.page.goto(self.url)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert self.complaints == []
        assert [u for u in self.asked if not u.startswith("data:")] == [self.url]

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def move(self, steps: int) -> None:
        """Move the slider with the keyboard."""
        self.page.focus("#limit")
        for _ in range(abs(steps)):
            self.page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")


def test_every_section_is_drawn(browser: Any, report: Path) -> None:
    with Watched(browser, report) as seen:
        for name in ("cost-chart", "return-chart", "plane", "learning-cost", "learning-return", "metric-chart"):
            assert seen.page.locator(f"#{name} svg .mark").count() >= 2, name
        assert seen.page.locator("#plane .logged circle").count() == 500
        assert seen.page.locator("#fallback svg .mark").count() == 2
        assert seen.page.locator("#calibration svg .mark").count() == 2
        assert seen.page.locator("#histograms figure").count() == 2
        assert seen.page.locator("#histograms .over").count() == 4  # 14 of qpt; 50 to 52 and 60 of bold, in bins
        assert "3e-04" in seen.page.text_content("#provenance") or "0.0003" in seen.page.text_content("#provenance")


def test_the_slider_moves_the_numbers(browser: Any, report: Path) -> None:
    with Watched(browser, report) as seen:
        assert seen.text("#limit-value") == "10"
        before = seen.text("#readout")
        assert "cost 10.3" in before
        assert "bold" in before
        assert "cost limit 10" in seen.text("#tables")
        assert "310.0" in seen.text("#tables")
        place = seen.page.get_attribute("#cost-chart .limit-line", "x1")
        seen.move(1)
        assert seen.text("#limit-value") == "20"
        assert seen.page.get_attribute("#limit", "aria-valuetext") == "cost limit 20"
        after = seen.text("#readout")
        assert "cost 19.0" in after
        assert "return 510.0" in after
        assert "bold" not in after  # which was not run at 20
        assert "310.0" not in seen.text("#tables")
        assert float(seen.page.get_attribute("#cost-chart .limit-line", "x1")) > float(place)
        assert seen.page.locator("#histograms figure").count() == 1
        seen.move(-1)
        assert seen.text("#readout") == before


def test_the_other_controls(browser: Any, report: Path) -> None:
    with Watched(browser, report) as seen:
        assert "All tasks, cost limit 10" in seen.text("#matrix")
        marks = seen.page.locator("#plane .mark")
        count = marks.count()
        seen.page.click("#methods button:has-text('bold')")
        assert seen.page.get_attribute("#methods button:has-text('bold')", "aria-pressed") == "false"
        assert marks.count() == count - 1
        seen.page.click("#methods button:has-text('bold')")
        assert marks.count() == count
        seen.page.select_option("#task", "CarRun")
        assert seen.text("#limit-value") == "40"
        assert seen.page.is_disabled("#limit")  # one limit alone
        assert "CarRun, cost limit 40" in seen.text("#tables")
        assert "no evaluations during training" in seen.text("#learning")
        assert "name them with --data" in seen.text("#plane-caption")


def test_all_of_it_is_within_reach_of_the_keyboard(browser: Any, report: Path) -> None:
    with Watched(browser, report) as seen:
        reached = []
        for _ in range(60):
            seen.page.keyboard.press("Tab")
            reached.append(
                seen.page.evaluate(
                    "(document.activeElement.id || document.activeElement.className.baseVal"
                    " || document.activeElement.className || document.activeElement.tagName)"
                )
            )
        assert {"skip", "theme", "task", "limit", "chip", "scroll", "metric", "SUMMARY"} <= set(reached)
        assert any("mark" in name for name in reached)
        seen.page.locator("#cost-chart .mark").first.focus()
        assert seen.page.is_visible("#tip")
        assert "limit" in seen.text("#tip")
        seen.page.locator("summary").first.focus()
        assert seen.page.is_hidden("#tip")
        seen.page.keyboard.press("Enter")
        assert seen.page.locator("details[open]").count() == 1


@pytest.mark.parametrize("size", [PHONE, {"width": 768, "height": 1024}, DESKTOP])
def test_no_width_scrolls_sideways(browser: Any, report: Path, size: dict[str, int]) -> None:
    with Watched(browser, report, size) as seen:
        seen.page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert seen.page.evaluate("document.documentElement.scrollWidth") == size["width"]
        wide = seen.page.evaluate(
            "[...document.querySelectorAll('svg')].filter((s) => s.getBoundingClientRect().right"
            " > innerWidth && !s.closest('#methods')).length"
        )
        assert wide == 0


def test_a_turned_phone_is_drawn_anew(browser: Any, report: Path) -> None:
    with Watched(browser, report, PHONE) as seen:
        width = float(seen.page.get_attribute("#plane svg", "width"))
        seen.page.set_viewport_size({"width": PHONE["height"], "height": PHONE["width"]})
        for _ in range(100):  # it waits a moment, lest it draw at every pixel of a drag
            if float(seen.page.get_attribute("#plane svg", "width")) > width + 200:
                break
            seen.page.wait_for_timeout(50)
        assert float(seen.page.get_attribute("#plane svg", "width")) > width + 200


def test_dark_by_the_system_and_by_hand(browser: Any, report: Path) -> None:
    def light(seen: Watched) -> float:
        """Mean brightness of the page's background and of its text."""
        colour = "getComputedStyle(document.body)['{}'].match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0) / 3"
        back, ink = (float(seen.page.evaluate(colour.format(k))) for k in ("backgroundColor", "color"))
        assert abs(back - ink) > 120  # readable
        return back

    with Watched(browser, report) as seen:
        assert light(seen) > 200
        for _ in range(2):  # auto, light, dark
            seen.page.click("#theme")
        assert light(seen) < 60
        assert "dark" in seen.text("#theme")
    with Watched(browser, report, scheme="dark") as seen:
        assert light(seen) < 60
        seen.page.click("#theme")
        assert light(seen) > 200


def test_hostile_names_are_shown_and_do_nothing(browser: Any, tmp_path: Path) -> None:
    page = write_report(hostile_runs(tmp_path), tmp_path / "r.html", title="<b>x")[0]
    with Watched(browser, page) as seen:
        assert seen.page.evaluate("window.hit") is None
        assert seen.page.locator("img").count() == 0
        assert "<script>" in seen.text("#methods")
        assert seen.text("h1") == "<b>x"
        seen.page.locator("#cost-chart .mark").first.focus()
        assert "<script>" in seen.text("#tip")
        assert seen.page.evaluate("window.hit") is None


def test_the_policy_of_the_page_stops_foreign_scripts(browser: Any, report: Path, tmp_path: Path) -> None:
    """Should an escape ever be missing, the hash in the page's policy still stands."""
    broken = tmp_path / "broken.html"
    broken.write_text(report.read_text("utf-8").replace("<main>", "<main><script>window.hit = 1</script>"), "utf-8")
    seen = Watched(browser, broken)
    assert seen.page.evaluate("window.hit") is None
    assert any("Content Security Policy" in text for text in seen.complaints)
    seen.context.close()
