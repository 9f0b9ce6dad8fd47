"""Writes the Grafana boards and the Prometheus alert rules from boards.toml.

    python deploy/grafana/generate.py            writes NAME.json of each board, and alerts.yml, beside this file

`generate` is pure: it returns the files' names and texts, so that a test can compare them with what is committed.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
QUANTILES = (0.5, 0.9, 0.99)
_COLUMNS, _HEIGHT, _STAT_HEIGHT = 24, 8, 4
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# A metric, which may have a selector already; moonpool_role and moonpool_name are labels.
_METRIC = re.compile(r"\b(?!moonpool_(?:role|name)\b)((?:moonpool|process)_\w+)(\{)?")


def generate(description: str) -> dict[str, str]:
    """Return the text of each file by its name. Raise KeyError for a board, panel or alert that lacks a key."""
    described = tomllib.loads(description)
    files = {f"{each['name']}.json": _json(board(each)) for each in described["board"]}
    return {**files, "alerts.yml": "\n".join(_rules(described["alert"])) + "\n"}


def queries_of(panel: dict[str, Any]) -> list[dict[str, str]]:
    """Return the queries of a panel with their legends, without Grafana's variables replaced."""
    if "quantiles" not in panel:
        return [{**each, "expr": each["expr"].replace("RATE", "$__rate_interval")} for each in panel["queries"]]
    buckets = f"sum by (le) (rate({panel['quantiles']}_bucket[$__rate_interval]))"
    return [{"expr": f"histogram_quantile({part:g}, {buckets})", "legend": f"p{100 * part:g}"} for part in QUANTILES]


def board(described: dict[str, Any]) -> dict[str, Any]:
    """Return a board in Grafana's format. It asks for a data source and for the job that reads Moonpool."""
    job = {
        "name": "job",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": "label_values(moonpool_missing_roles, job)", "refId": "job"},
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        "refresh": 2,
    }
    return {
        "uid": f"moonpool-{described['name']}",
        "title": described["title"],
        "tags": ["moonpool"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "links": [{"title": "Moonpool", "type": "dashboards", "tags": ["moonpool"], "asDropdown": True}],
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, job]},
        "panels": list(_panels(described["panel"])),
    }


def _panels(described: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Place the panels from left to right, row by row."""
    x, y, row_height = 0, 0, 0
    for number, panel in enumerate(described, start=1):
        width = panel.get("width", 8)
        height = _STAT_HEIGHT if panel.get("kind") == "stat" else _HEIGHT
        if x + width > _COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        yield _panel(number, panel, {"x": x, "y": y, "w": width, "h": height})
        x, row_height = x + width, max(row_height, height)


def _panel(number: int, panel: dict[str, Any], place: dict[str, int]) -> dict[str, Any]:
    kind = panel.get("kind", "timeseries")
    defaults: dict[str, Any] = {"unit": panel.get("unit", "short")}
    if kind == "timeseries":
        stacked = panel.get("stacked", False)
        stacking = {"mode": "normal" if stacked else "none", "group": "A"}
        defaults["custom"] = {"fillOpacity": 40 if stacked else 5, "stacking": stacking, "showPoints": "never"}
    targets = [
        {
            "datasource": _SOURCE,
            "refId": chr(ord("A") + index),
            "expr": _of_job(query["expr"]),
            "legendFormat": query["legend"],
        }
        for index, query in enumerate(queries_of(panel))
    ]
    return {
        "id": number,
        "type": kind,
        "title": panel["title"],
        "description": panel.get("text", ""),
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


def _of_job(query: str) -> str:
    """Return the query with the board's job in every selector."""

    def select(found: re.Match[str]) -> str:
        return f'{found[1]}{{job=~"$job"' + (", " if found[2] else "}")

    return _METRIC.sub(select, query)


def _rules(alerts: list[dict[str, str]]) -> Iterator[str]:
    """Yield the lines of the rule file. A JSON string is a YAML string, too."""
    yield "# Generated from boards.toml by generate.py; change these, not this file."
    yield "groups:"
    yield "  - name: moonpool"
    yield "    rules:"
    for alert in alerts:
        yield f"      - alert: {alert['name']}"
        yield f"        expr: {json.dumps(alert['query'] + ' ' + alert['when'])}"
        yield f"        for: {alert['for']}"
        yield f"        labels: {{severity: {alert['severity']}}}"
        yield "        annotations:"
        yield from (f"          {name}: {json.dumps(alert[name])}" for name in ("summary", "description"))


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


if __name__ == "__main__":
    for name, text in generate((FOLDER / "boards.toml").read_text()).items():
        (FOLDER / name).write_text(text)
