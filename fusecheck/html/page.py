"""The kit of every page: escaping, layout, tables, drawings.

All foreign text goes through `text`: made printable, then escaped. Drawings are SVG in percent of the width they get, so
that they need no script to fit a telephone; lengths are to scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fusecheck import __version__
from fusecheck.errors import printable
from fusecheck.html.style import STYLE

_WORDS = {
    "pass": "pass",
    "fail": "fail",
    "not run": "mute",
    "see above": "mute",
    "faster": "pass",
    "slower": "warn",
    "no gain": "mute",
}


def text(value: object) -> str:
    """Foreign text as HTML: invisible characters spelled out, markup escaped."""
    return escape(printable(str(value)), quote=True)


def page(title: str, parts: Iterable[str], stamp: str | None) -> str:
    """The whole file. `stamp` is printed at its end; empty parts are left out."""
    made = f"fusecheck {__version__}" + (f", {stamp}" if stamp is not None else "")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline';"
        " base-uri 'none'; form-action 'none'\">\n"
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer><p>{text(made)}</p></footer>\n</main>\n</body>\n</html>\n"
    )


def chip(word: str, label: str = "") -> str:
    """A verdict or an outcome in its colour, after a label."""
    return f'<span class="chip {_WORDS[word]}">{text(f"{label} {word}".strip())}</span>'


def section(heading: str, inner: str) -> str:
    """A card under a heading."""
    return f'<section><h2>{heading}</h2><div class="card">{inner}</div></section>'


def items(lines: Iterable[str]) -> str:
    """A list of foreign lines."""
    return f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>"


def bullets(heading: str, lines: Sequence[str]) -> str:
    """A card with a list, or nothing where there are no lines."""
    return section(heading, items(lines)) if lines else ""


def facts_table(heading: str, rows: Iterable[tuple[str, str]]) -> str:
    """A card with a table of (name, value)."""
    body = "".join(f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>' for name, value in rows)
    return section(heading, f"<table><tbody>{body}</tbody></table>")


def stack(caption: str, columns: Sequence[str], rows: str, *, numbers: Sequence[str] = (), css: str = "stack") -> str:
    """A table whose rows become blocks on a telephone; columns of `numbers` are set right."""
    heads = "".join(f'<th scope="col"{_class("n" if name in numbers else "")}>{name}</th>' for name in columns)
    return (
        f'<table class="{css}"><caption>{caption}</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""


def row(label: str, head: str, cells: Iterable[str]) -> str:
    """A row of a stack, headed by its first cell."""
    return f'<tr><th scope="row" data-label="{label}">{head}</th>{"".join(cells)}</tr>'


def cell(label: str, inner: str, css: str = "") -> str:
    """A cell of a stack; `label` names its column where the head is hidden."""
    return f'<td data-label="{label}"{_class(css)}>{inner}</td>'


def svg(css: str, height: int, title: str, description: str, inner: str) -> str:
    """A drawing with its words for those who do not see it."""
    return (
        f'<svg class="{css}" role="img" height="{height}"><title>{text(title)}</title>'
        f"<desc>{text(description)}</desc>{inner}</svg>"
    )


def percent(share: float) -> str:
    """A length as SVG takes it."""
    return f"{100 * share:.4f}%"
