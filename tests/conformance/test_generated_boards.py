"""The committed boards and alert rules are what deploy/grafana/generate.py writes from its description."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
BOARDS = ("overview", "pool", "transfer", "conductor")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_boards", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_files_are_those_of_the_description(generator: ModuleType) -> None:
    written = generator.generate((FOLDER / "boards.toml").read_text())
    assert written.keys() == {*(f"{name}.json" for name in BOARDS), "alerts.yml"}
    committed = {path.name: path.read_text() for path in FOLDER.iterdir() if path.name in written}
    assert committed == written, "run: python deploy/grafana/generate.py"


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_has_a_place_and_the_job_for_everything(name: str) -> None:
    board = json.loads((FOLDER / f"{name}.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, f"{panel['title']} covers another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
        for target in panel["targets"]:
            selected = re.findall(r'\b(?:moonpool|process)_\w+\{job=~"\$job"', target["expr"])
            named = re.findall(r"\b(?!moonpool_(?:role|name)\b)(?:moonpool|process)_\w+", target["expr"])
            assert len(selected) == len(named) > 0, target["expr"]
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(titles)) == len(titles)


def test_a_selector_keeps_its_labels(generator: ModuleType) -> None:
    query = {"expr": 'sum by (moonpool_name) (moonpool_x{a="b"} / process_y)', "legend": ""}
    described = {"name": "one", "title": "One", "panel": [{"title": "a", "queries": [query]}]}
    (panel,) = generator.board(described)["panels"]
    wanted = 'sum by (moonpool_name) (moonpool_x{job=~"$job", a="b"} / process_y{job=~"$job"})'
    assert panel["targets"][0]["expr"] == wanted
