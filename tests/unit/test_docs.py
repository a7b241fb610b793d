"""The pages say what the code says, and the examples are recipes that load."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from surefoot.recipe import load

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_parts_of_the_pages_are_current() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert generate["main"](check=True) == 0


def test_a_stale_page_is_noticed() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    stale = "<!-- generated: methods -->\nold\n<!-- end -->"
    assert "leave_one_out" in generate["filled"](stale)
    assert "old" not in generate["filled"](stale)


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("examples/*.yaml")), ids=lambda p: p.name)
def test_every_example_is_a_recipe(recipe: Path) -> None:
    assert load(recipe).run.steps


def test_links_in_the_pages_lead_somewhere() -> None:
    import re

    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
