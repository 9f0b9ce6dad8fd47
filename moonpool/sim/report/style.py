"""The style sheet of the report: light or dark as the reader's system prefers, one column on a phone.

A colour stands for one system on the whole page. What is drawn of one system alone (places, states, links) has tints of
that system's colour, and lines are dashed besides, so that no colour means two things.
"""

from __future__ import annotations

from typing import NamedTuple

NUM_COLORS = 12

_LIGHT = (
    "#0068a8", "#d98200", "#00855f", "#b8508f", "#c24a00", "#3d95d6",
    "#7d6a00", "#5a5a5a", "#7a4fc4", "#a3213b", "#2f7d86", "#8a5a3c",
)  # fmt: skip
_DARK = (
    "#57aee8", "#f2b441", "#35c99c", "#e89bc6", "#f4915a", "#9bd4f5",
    "#dcc94f", "#bdbdbd", "#b79bf0", "#f07f93", "#6fc6cf", "#cfa385",
)  # fmt: skip


def _variables(colors: tuple[str, ...], ground: str, card: str, ink: str, faint: str, line: str) -> str:
    numbered = "".join(f"--c{at}:{color};" for at, color in enumerate(colors))
    return f"{numbered}--ground:{ground};--card:{card};--ink:{ink};--faint:{faint};--line:{line};"


CSS = (
    f":root{{color-scheme:light dark;{_variables(_LIGHT, '#f6f7f9', '#ffffff', '#1b1f24', '#59636e', '#d9dee4')}}}\n"
    f"@media (prefers-color-scheme:dark){{:root{{"
    f"{_variables(_DARK, '#101317', '#191e24', '#e6e9ed', '#9aa5b1', '#313942')}}}}}\n"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:16px}
h1{font-size:1.5rem;line-height:1.25;margin:.2em 0;max-width:40em}
h2{font-size:1.15rem;margin:1.6em 0 .5em}
h2 .legend{font-size:inherit}
h3{font-size:1rem;margin:0 0 .3em}
p{margin:.3em 0;color:var(--faint)}
.headline{font-size:1.12rem;color:var(--ink);max-width:60em}
pre{margin:.3em 0;padding:8px;background:var(--card);border:1px solid var(--line);border-radius:8px;overflow-x:auto}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}
figure,.card{margin:0;padding:12px;background:var(--card);border:1px solid var(--line);border-radius:8px;min-width:0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px 3px 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}
td:first-child{white-space:normal;min-width:8.5em}
.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere}
details{margin-top:6px;font-size:.87rem;color:var(--faint)}
summary{cursor:pointer}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:0 0 4px;padding:0;list-style:none;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:5px}
.legend svg{width:22px;height:10px;flex:none}
svg{display:block;width:100%;height:auto}
svg text{font:11.5px system-ui,sans-serif;fill:var(--faint)}
.axis{stroke:var(--line);stroke-width:1}
.series{fill:none;stroke-width:2;stroke-linejoin:round}
.target{stroke:var(--ink);stroke-width:1;stroke-dasharray:2 3}
.band{fill:transparent}
.band:hover{fill:var(--ink);fill-opacity:.09}
@media (max-width:520px){svg text{font-size:15px}main{padding:10px}}
""".strip()
    + "\n"
)


class Hue(NamedTuple):
    """`system` is the number of a system, None for what belongs to all of them; `part` counts what is drawn of one."""

    system: int | None
    part: int = 0


_TINTS = (100, 68, 42, 24)  # percent of the colour; the rest is the background
_LEAST_LINE_TINT = 55  # thinner colours cannot be seen as a line
_DASHES = ("", "7 3", "2 3", "10 3 2 3")


def fill(hue: Hue) -> str:
    """Return the colour of an area or a bar."""
    return _tinted(hue, _TINTS[hue.part % len(_TINTS)])


def stroke(hue: Hue) -> str:
    """Return the attributes of a line. Systems beyond the last colour are dashed, too."""
    pattern = _DASHES[hue.part % len(_DASHES)]
    if hue.system is not None and hue.system >= NUM_COLORS:
        pattern = pattern or _DASHES[1]
    dashes = f' stroke-dasharray="{pattern}"' if pattern else ""
    return f'stroke="{_tinted(hue, max(_TINTS[hue.part % len(_TINTS)], _LEAST_LINE_TINT))}"{dashes}'


def _tinted(hue: Hue, percent: int) -> str:
    name = "var(--ink)" if hue.system is None else f"var(--c{hue.system % NUM_COLORS})"
    return name if percent == 100 else f"color-mix(in srgb,{name} {percent}%,var(--card))"
