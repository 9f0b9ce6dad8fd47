"""safetensors files into the pool and out of it, a tensor at a time: each is an object, as put_tensor() makes them.

A file that is loaded is mapped, never read as a whole; it must not be cut short meanwhile. A file that is saved appears
under its name when it is complete.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from moonpool.base.errors import FewerReplicas, InvalidInput, from_wire
from moonpool.store.client import Put, StoreClient
from moonpool.store.keys_text import key_bytes
from moonpool.store.put_settings import PutSettings, as_wish
from moonpool.store.tensors.arrays import row_major
from moonpool.store.tensors.safetensors_index import FileTensor, checked_names, make_index, read_index
from moonpool.store.tensors.tensor_calls import TensorCalls
from moonpool.store.tensors.whole_file import whole_file

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_STEP_NBYTES = 64 * 1024 * 1024
_STEP_TENSORS = 256


def load(
    path: Path, client: StoreClient, prefix: str, settings: PutSettings, progress: Progress | None = None
) -> list[str]:
    """Puts every tensor of the file under prefix + its name; the keys. Raises the first error, with the key in its
    text; what was stored before it stays.
    """
    data = _mapped(path)
    tensors = read_index(data, data.nbytes)
    wish = as_wish(settings)
    done, total = 0, sum(tensor.form.nbytes for tensor in tensors)
    for step in _steps(tensors):
        puts = [
            Put(
                key=key_bytes(prefix + tensor.name),
                buffers=[tensor.form.pack(), data[tensor.start : tensor.start + tensor.form.nbytes]],
                **wish,
            )
            for tensor in step
        ]
        for tensor, error in zip(step, client.put_many(puts), strict=True):
            if error is not None and not isinstance(error, FewerReplicas):
                raise from_wire(error.code, f"{prefix + tensor.name}: {error}") from error
        done += sum(tensor.form.nbytes for tensor in step)
        if progress is not None:
            progress(done, total)
    return [prefix + tensor.name for tensor in tensors]


def save(
    path: Path,
    tensors: TensorCalls,
    keys: Mapping[str, bytes],
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the tensors under these keys to a file, by name. NotFound for a key that is not there, InvalidInput for
    what is no tensor or changed its form meanwhile. The file that was there before stays after an error.
    """
    forms = {name: tensors.form(keys[name]) for name in checked_names(keys)}
    front, order = make_index(forms, metadata)
    done, total = 0, sum(form.nbytes for form in forms.values())
    with whole_file(path) as file:
        file.write(front)
        for name in order:
            form, elements = tensors.view_elements(keys[name])
            if (form.dtype, form.shape) != (forms[name].dtype, forms[name].shape):
                raise InvalidInput(f"{name} was {forms[name]} and has become {form} while the file was written")
            file.write(row_major(form, elements))
            done += form.nbytes
            if progress is not None:
                progress(done, total)


def _mapped(path: Path) -> memoryview:
    """The file's bytes; the mapping ends with the last view of it."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise InvalidInput(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _steps(tensors: list[FileTensor]) -> Iterator[list[FileTensor]]:
    step: list[FileTensor] = []
    nbytes = 0
    for tensor in tensors:
        step.append(tensor)
        nbytes += tensor.form.nbytes
        if nbytes >= _STEP_NBYTES or len(step) >= _STEP_TENSORS:
            yield step
            step, nbytes = [], 0
    if step:
        yield step
