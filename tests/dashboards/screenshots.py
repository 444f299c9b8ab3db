"""Pictures of every view for the documentation: ``python -m tests.dashboards.screenshots DIR``."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from routeprof.dashboards import create_app
from routeprof.dashboards.serve import make_server
from routeprof.dashboards.views import VIEWS
from routeprof.sample_data import RECORDINGS_DIR, load_model
from routeprof.sample_data.record import record_prompts
from tests.dashboards.test_browser import ARGUMENTS, CHROMIUM, drawn

DARK = ("overview", "heatmap", "layouts")
CHOSEN = {
    "compare": "&against=collapsed",
    "findings": "&gains=yes&ranks=4",
    "plan": "&model=deepseek-v3&ranks=8&memory=140&dtype=fp8&batch=64",
    "prompts": "&batch=8",
    "ranks": "&tag=code&redundant=1",
}
WIDTH, PHONE = 1280, 390


def main(out: Path) -> None:
    """Record the sample model with all its tokens, and take the pictures."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="routeprof-") as folder, sync_playwright() as driver:
        path = Path(folder) / "sample"
        record_prompts(load_model(), path, level="tokens", window=0.25, new_tokens=32)
        server = make_server(create_app(path, RECORDINGS_DIR / "collapsed"), port=0)
        threading.Thread(target=server.run, daemon=True).start()
        url = f"http://127.0.0.1:{server.effective_port}"
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        for view in VIEWS:
            query = "?run=sample" + CHOSEN.get(view.path, "")
            address = f"{url}/{view.path}{query}"
            shot(browser, address, len(view.panels), out / f"{view.path}.png")
            if view.path in DARK:
                shot(browser, address, len(view.panels), out / f"{view.path}-dark.png", "dark")
        shot(browser, f"{url}/health?run=sample", 1, out / "health-phone.png", width=PHONE)
        browser.close()
        server.close()


def shot(
    browser: Any, url: str, figures: int, path: Path, scheme: str = "light", width: int = WIDTH
) -> None:
    """One whole page."""
    page = browser.new_page(
        viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
    )
    page.goto(url)
    drawn(page, figures)
    # As tall as the page, so that the menu is, too.
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": width, "height": max(height, 800)})
    drawn(page, figures)
    page.screenshot(path=str(path), full_page=True)
    page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
