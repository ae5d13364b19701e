"""The rows of a fused tensor, drawn to scale."""

from __future__ import annotations

from collections.abc import Sequence

from fusecheck.errors import shown
from fusecheck.html.page import percent, svg, text


def row_map(tensor: str, parts: Sequence[tuple[str, int, int]], axis: str = "rows") -> str:
    """The rows (or columns) of a tensor to scale, as SVG and in words. `parts`: (label, shard_offset, rows)."""
    total = sum(rows for _, _, rows in parts) or 1
    drawn, shown_at = [], -1.0
    for number, (label, offset, rows) in enumerate(parts):
        share, begin = rows / total, offset / total
        words = f"{shown(label, 16)} \u00b7 {rows}" if share >= 0.2 else shown(label, 16)
        drawn.append(
            f'<rect class="p{min(number, 3)}" x="{percent(begin)}" y="0" width="{percent(share)}" height="36" rx="3"/>'
            f'<text class="on" x="{percent(begin + share / 2)}" y="23" text-anchor="middle">{text(words)}</text>'
        )
        if begin - shown_at >= 0.12 and begin <= 0.86:
            anchor = "middle" if offset else "start"
            drawn.append(f'<text x="{percent(begin)}" y="53" text-anchor="{anchor}">{offset}</text>')
            shown_at = begin
    drawn.append(f'<text x="100%" y="53" text-anchor="end">{total}</text>')
    words = "; ".join(f"{label} {axis} {offset} to {offset + rows - 1}" for label, offset, rows in parts)
    legend = "".join(
        f'<li><i class="p{min(number, 3)}"></i><b>{text(label)}</b> {axis} {offset:,} to {offset + rows - 1:,}'
        f"{f', shard_offset {offset:,}' if axis == 'rows' else ''}</li>"
        for number, (label, offset, rows) in enumerate(parts)
    )
    drawing = svg(
        "map",
        58,
        f"{axis[:-1].capitalize()} map of {tensor}",
        f"To scale, first {axis[:-1]} left: {words}",
        "".join(drawn),
    )
    return f'{drawing}<ul class="legend">{legend}</ul>'
