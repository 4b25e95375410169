"""One self-contained page: tables that sort by a click on a heading, pictures inside, no network."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ccc; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { cursor: pointer; }
img { max-width: 100%; }
</style></head><body>
<h1>{{ title }}</h1>
{% for heading, names, rows in tables %}<h2>{{ heading }}</h2>
<table><thead><tr>{% for name in names %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}<td data-value="{{ cell if cell is not none }}">
{{- "%.3f" | format(cell) if cell is float else cell if cell is not none }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
{% endfor %}{% for text in texts %}<p>{{ text }}</p>
{% endfor %}{% for name, data in images %}<p><img alt="{{ name }}" src="{{ data }}"></p>
{% endfor %}<script>
for (const head of document.querySelectorAll("th")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], at = head.cellIndex;
  const down = head.dataset.down = head.dataset.down === "yes" ? "no" : "yes";
  const value = row => row.cells[at].dataset.value;
  const order = (a, b) => isNaN(a) || isNaN(b) || a === "" || b === "" ? a.localeCompare(b) : a - b;
  const rows = [...body.rows].sort((a, b) => order(value(a), value(b)));
  body.append(...(down === "yes" ? rows.reverse() : rows));
};
</script></body></html>
"""
_KINDS = {".png": "image/png", ".svg": "image/svg+xml"}


def columns(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Names and cells of rows: the fields that hold one number, word or nothing in each of them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    flat = [n for n in names if all(isinstance(r.get(n), str | int | float | None) for r in rows)]
    return flat, [[row.get(name) for name in flat] for row in rows]


def page(
    title: str,
    tables: Sequence[tuple[str, Sequence[dict[str, Any]]]],
    texts: Sequence[str] = (),
    images: Sequence[Path] = (),
) -> str:
    """The page.

    Args:
        tables: (heading, rows).
        images: PNG or SVG files; their bytes go into the page.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    inside = []
    for path in images:
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        inside.append((path.name, f"data:{_KINDS[path.suffix]};base64,{data}"))
    return environment.from_string(_PAGE).render(
        title=title,
        tables=[(heading, *columns(rows)) for heading, rows in tables],
        texts=texts,
        images=inside,
    )
