"""The docs site builds without a warning, fetches nothing when read, and names files that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("mkdocs", reason="mkdocs is not here; pip install 'trunkline[docs]'")

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PATH = re.compile(r"\b(?:tests|benchmarks|deploy|examples|tools|traces)/[\w./-]*\w\.\w+")
TEST = re.compile(r"\btest_\w+\.py\b")
FETCHED = re.compile(
    r"""<(?:script|img|iframe|link rel="stylesheet")[^>]*?(?:src|href)=["']?https?:"""
)


def build(configuration: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # quiet counts no warnings
    return subprocess.run(
        [*command, "--config-file", str(configuration), "--site-dir", str(folder)],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_builds_strictly_and_fetches_nothing_when_it_is_read(tmp_path: Path) -> None:
    done = build(REPOSITORY / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr + "(a new page needs a line in mkdocs.yml: nav)"
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    fetching = [page.name for page in pages if FETCHED.search(page.read_text("utf-8"))]
    assert fetching == []


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[there](nowhere.md#at-all)\n")
    settings = (REPOSITORY / "mkdocs.yml").read_text("utf-8")
    (tmp_path / "mkdocs.yml").write_text(settings.partition("\nnav:")[0] + "\nnav: [index.md]\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr


def test_every_page_is_in_the_navigation_once() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text("utf-8")
    named = re.findall(r"[\w/-]+\.md\b", text.partition("\nnav:")[2])
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(named) == sorted(there), "add the page to mkdocs.yml, under nav"
    assert yaml.safe_load(text)["theme"]["font"] is False


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    assert [name for name in PATH.findall(text) if not (REPOSITORY / name).exists()] == []
    tests = {path.name for path in (REPOSITORY / "tests").rglob("test_*.py")}
    assert set(TEST.findall(text)) <= tests
