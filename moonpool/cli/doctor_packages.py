"""Whether the Python packages that the service needs are installed, by the word of Moonpool's own metadata. Pure
except for the look-up at the end.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moonpool.transfer.doctor import Finding

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(\[[^]]*\])?\s*(?:>=\s*([0-9.]+))?")
_EXTRA = re.compile(r"extra\s*==\s*[\"']([^\"']+)")
_HINT = "pip install 'moonpool[all]'"
NEEDED_EXTRAS = (None, "engine", "server")


class Requirement(NamedTuple):
    name: str
    minimum: str | None
    extra: str | None


def parse_requirement(text: str) -> Requirement | None:
    """Of the form `name>=1.2; extra == "x"`, which is all that our pyproject.toml uses; None for anything else."""
    match = _REQUIREMENT.match(text)
    if match is None or match[2] is not None:  # name[extra]: our own extras, listed one by one anyway
        return None
    extra = _EXTRA.search(text)
    return Requirement(match[1], match[3], extra[1] if extra else None)


def is_at_least(version: str, minimum: str) -> bool:
    """Compares release numbers: 2.13.0+cpu is at least 2.4."""
    return _numbers(version) >= _numbers(minimum)


def package_finding(requirements: Iterable[Requirement], installed: Callable[[str], str | None]) -> Finding:
    """One finding for all of them: every version when all are there, else those that are not."""
    wanted = [requirement for requirement in requirements if requirement.extra in NEEDED_EXTRAS]
    versions = {requirement.name: installed(requirement.name) for requirement in wanted}
    wrong = [problem for requirement in wanted if (problem := _problem(requirement, versions[requirement.name]))]
    if wrong:
        return Finding(name="packages", status="missing", says="; ".join(wrong), hint=_HINT, needed=True)
    says = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return Finding(name="packages", status="ok", says=says, needed=True)


def check_packages() -> Finding:
    try:
        texts = importlib.metadata.requires("moonpool") or []
    except importlib.metadata.PackageNotFoundError:
        says = "Moonpool runs from a folder and is not installed, so nobody knows what it needs"
        return Finding(name="packages", status="missing", says=says, hint="pip install -e '.[all]'")
    parsed = (parse_requirement(text) for text in texts)
    return package_finding([requirement for requirement in parsed if requirement is not None], _installed_version)


def _problem(requirement: Requirement, version: str | None) -> str | None:
    if version is None:
        return f"{requirement.name} is not installed"
    if requirement.minimum is not None and not is_at_least(version, requirement.minimum):
        return f"{requirement.name} is {version} and must be {requirement.minimum} or newer"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9.]*[0-9]", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
