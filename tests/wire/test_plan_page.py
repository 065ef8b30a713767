"""The page of a plan in a real Chromium: what stands in its plots can be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import chromium

from trunkline import cli

AGENTS = Path(__file__).parents[2] / "traces" / "smoke_agentic_16s.jsonl.gz"
"""Eight of its routers come out nearly alike."""

OVERLAPS = """() => [...document.querySelectorAll("figure svg")].flatMap(svg => {
  const texts = [...svg.querySelectorAll("text")].filter(one => one.textContent.trim());
  const placed = texts.map(one => [one.textContent.trim(), one.getBoundingClientRect()]);
  return placed.flatMap(([name, a], index) => placed.slice(index + 1)
    .filter(([_, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1)
    .map(([other]) => `${name} / ${other}`));
})"""


@pytest.mark.parametrize("width", [420, 1_000])
def test_no_two_texts_of_a_plot_are_on_one_another(width: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="trunkline[report] is not here")
    file = tmp_path / "plan.html"
    assert cli.main(["plan", str(AGENTS), "--workers", "8", "--html", str(file)]) == cli.OK
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.goto(file.as_uri())
        names = page.locator("figure svg text", has_text="trunkline").count()
        assert (names, page.evaluate(OVERLAPS)) == (1, [])
