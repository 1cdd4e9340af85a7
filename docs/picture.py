"""One training step of several ranks as a picture, from the trace that `PROFILE=1 launcher ...` leaves.

    python docs/picture.py runs/.../profile.json docs/images/step_on_two_hosts.svg [--step N]

Rows of each rank: kernels; what was waited for; sends, receives and sums. Arrows are messages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, ROW, GAP, TOP = 1100, 150, 22, 26, 40
ROWS = ("kernels", "waiting", "calls")  # of the lanes of a trace
NAMES = {"kernels": "kernels", "waiting": "waits for", "calls": "send, receive, sum"}
COLORS = {"kernels": "#7f8c9b", "waiting": "#d9a5a0", "send": "#2f7ed8", "receive": "#e0c068", "sum": "#4caf6e"}
LEGEND = (("kernels", "kernels"), ("send", "a send is handed over"), ("receive", "waits for a message"),
          ("sum", "sums"), ("waiting", "kernels wait"))  # fmt: skip
Event = dict[str, Any]


def color_of(e: Event) -> str:
    if e["cat"] != "calls":
        return COLORS[e["cat"]]
    word = e["name"].split()[0]
    return COLORS["send" if word == "send" else "receive" if word in ("receive", "wait") else "sum"]


def picture(events: list[Event], step: int) -> str:
    """SVG of the step with this number among those of the first rank; negative ones count from the last."""
    steps = sorted(
        (e for e in events if e["ph"] == "X" and e["cat"] == "steps" and e["pid"] == 0), key=lambda e: e["ts"]
    )
    begin = steps[step]["ts"]
    end = max(
        e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "steps" and begins_in(e, steps[step])
    )
    ranks = sorted({e["pid"] for e in events})
    per_us = (WIDTH - LEFT - 20) / (end - begin)
    height = TOP + len(ranks) * (len(ROWS) * ROW + GAP) + 30

    def x(ts: float) -> float:
        return LEFT + (min(max(ts, begin), end) - begin) * per_us

    def y(pid: int, row: int) -> float:
        return TOP + ranks.index(pid) * (len(ROWS) * ROW + GAP) + row * ROW

    box = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}>']
    out += ['<rect width="100%" height="100%" fill="white"/>', *legend()]
    for pid in ranks:
        for i, row in enumerate(ROWS):
            out.append(f'<text x="8" y="{y(pid, i) + 15:.0f}">host {pid}: {NAMES[row]}</text>')
            inside = [
                e for e in events if e["ph"] == "X" and e["pid"] == pid and e["cat"] == row and overlaps(e, begin, end)
            ]
            out += bars(inside, x, y(pid, i))
    out += arrows(events, begin, end, x, y)
    out += axis(end - begin, per_us, height)
    return "\n".join([*out, "</svg>", ""])


def begins_in(e: Event, step: Event) -> bool:
    return bool(step["ts"] - step["dur"] / 2 <= e["ts"] <= step["ts"] + step["dur"] / 2)


def overlaps(e: Event, begin: float, end: float) -> bool:
    return bool(e["ts"] < end and e["ts"] + e["dur"] > begin)


def bars(events: Iterable[Event], x: Any, top: float) -> list[str]:
    """Those narrower than a part of a pixel are left out where another one stands already."""
    out, last = [], -1.0
    for e in sorted(events, key=lambda e: e["ts"]):
        left, right = x(e["ts"]), x(e["ts"] + e["dur"])
        if right - left < 0.3 and left < last + 0.3:
            continue
        last = right
        out.append(
            f'<rect x="{left:.1f}" y="{top:.0f}" width="{max(right - left, 0.5):.1f}" height="{ROW - 4}" '
            f'fill="{color_of(e)}"><title>{escape(e["name"])}</title></rect>'
        )
    return out


def arrows(events: Iterable[Event], begin: float, end: float, x: Any, y: Any) -> list[str]:
    """Also of messages that leave before or come after, from or to the edge."""
    leave = {e["id"]: e for e in events if e["ph"] == "s" and e["ts"] <= end}
    out = []
    for e in events:
        if e["ph"] == "f" and e["id"] in leave and e["ts"] >= begin:
            s = leave[e["id"]]
            down = y(s["pid"], 0) < y(e["pid"], 0)
            start, stop = y(s["pid"], 2) + (ROW - 4 if down else 0), y(e["pid"], 2) + (0 if down else ROW - 4)
            out.append(
                f'<line x1="{x(s["ts"]):.1f}" y1="{start:.0f}" x2="{x(e["ts"]):.1f}" y2="{stop:.0f}" stroke="#2f7ed8" '
                'stroke-width="0.7" stroke-opacity="0.6"/>'
            )
    return out


def legend() -> list[str]:
    out, at = [], LEFT
    for kind, text in LEGEND:
        out.append(f'<rect x="{at}" y="10" width="12" height="12" fill="{COLORS[kind]}"/>')
        out.append(f'<text x="{at + 17}" y="21">{text}</text>')
        at += 40 + 7 * len(text)
    return out


def axis(length_us: float, per_us: float, height: float) -> list[str]:
    every = next(n for n in (1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7) if length_us / n <= 12)
    marks = range(int(length_us / every) + 1)
    return [
        f'<text x="{LEFT + i * every * per_us:.0f}" y="{height - 8}" text-anchor="middle">{i * every / 1e3:g} ms</text>'
        for i in marks
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--step", type=int, default=-2, help="of rank 0; negative: from the last")
    args = parser.parse_args()
    events = json.loads(args.trace.read_text(encoding="utf-8"))["traceEvents"]
    args.svg.write_text(picture(events, args.step), encoding="utf-8")


if __name__ == "__main__":
    main()
