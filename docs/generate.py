"""Fill the generated parts of the pages from the code: method rows and recipe keys.

    python docs/generate.py            rewrite the pages
    python docs/generate.py --check    exit 1 if one of them is not current

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surefoot.methods import describe, rows
from surefoot.methods.built import BUILT
from surefoot.recipe.schema import SECTIONS, DataSource, RewardPart, Section

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/methods.md", "docs/recipes.md")


def method_table() -> str:
    lines = ["| method | what differs from the default of its type |", "|---|---|"]
    for name, row in rows().items():
        lines.append(f"| `{name}` | {_words(describe(row))} |")
    return "\n".join(lines)


def built_table() -> str:
    lines = ["| field | values that are built |", "|---|---|"]
    for field, values in BUILT.items():
        words = ", ".join(f"`{str(value).lower()}`" for value in sorted(values, key=str))
        lines.append(f"| `{field}` | {words} |")
    return "\n".join(lines)


def key_tables() -> str:
    sections: dict[str, type[Section]] = {
        "model": SECTIONS["model"],
        "data": DataSource,
        "reward": RewardPart,
        **{name: section for name, section in SECTIONS.items() if name != "model"},
    }
    parts = []
    for name, section in sections.items():
        lines = [f"### {name}", "", str(section.__doc__).strip(), "", "| key | default | meaning |"]
        lines.append("|---|---|---|")
        for key, field in section.model_fields.items():
            default = "required" if field.is_required() else _default(field)
            lines.append(f"| `{name}.{key}` | {default} | {field.description} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _words(value: Mapping[str, Any]) -> str:
    return "; ".join(f"{key} {_word(item)}" for key, item in value.items())


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        (_, kind), *options = value.items()
        inside = ", ".join(f"{name} {_word(item)}" for name, item in options)
        return f"{kind}({inside})" if inside else str(kind)
    if isinstance(value, list):
        return " + ".join(_word(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) and len(str(value)) > 8 else str(value)


PARTS: Mapping[str, Callable[[], str]] = {
    "methods": method_table,
    "built": built_table,
    "keys": key_tables,
}


def filled(text: str) -> str:
    """The page with its generated parts made anew."""

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- generated: (\w+) -->).*?(<!-- end -->)", part, text, flags=re.DOTALL)


def main(*, check: bool) -> int:
    stale = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            stale.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and stale:
        print(f"not current: {', '.join(stale)}; run: make docs")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
