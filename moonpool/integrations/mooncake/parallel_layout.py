"""How a tensor is divided among ranks: upstream's request types, the keys of the parts, and what a write stores. Pure.

A request names up to four axes, each of another kind: TP divides a dimension into equal parts; DP, EP (with the number
of an expert) and PP (with the number of a stage) only tell apart tensors that are stored under one key.

    KEY_tp_RANK                         the part of one rank, when TP is the only axis
    KEY__tp_0of4_sd1__pp_0of2_sid7      the same with more axes; the kinds are in the order DP, TP, EP, PP
    KEY__parallelism_manifest           how the tensor was cut, beside both of them
    KEY__writer_0of4_sd1, KEY__writer_manifest    the same for a `writer_partition`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.tensor_format import MAX_AXES, AxisKind, Manifest, StoredAxis, TensorHeader
from moonpool.integrations.mooncake.tensor_slicing import Cut, Parts, object_parts, shard, whole_cut

_MODES = ("as_stored", "shard", "full")


@dataclass
class ParallelAxis:
    """One axis of a request, as callers state it."""

    kind: str = ""
    rank: int = 0
    size: int = 1
    split_dim: int | None = None
    expert_id: int | None = None
    stage_id: int | None = None


@dataclass
class TensorParallelism:
    axes: list[ParallelAxis] = field(default_factory=list)


class ReadTarget:
    """What a read returns: the object `as_stored`, the part of one rank (`shard`) or the whole tensor (`full`)."""

    def __init__(self, mode: str = "as_stored", parallelism: TensorParallelism | None = None) -> None:
        self.mode = mode
        self.parallelism = parallelism

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        """Raise RuntimeError for an unknown mode. Capitals count as small letters."""
        if mode.lower() not in _MODES:
            raise RuntimeError(f"Unsupported ReadTarget mode: {mode}")
        self._mode = mode.lower()


class Axis(NamedTuple):
    """One axis of a checked request, or of a stored part."""

    kind: AxisKind
    rank: int
    size: int
    split_dim: int | None
    expert_id: int | None
    stage_id: int | None

    @property
    def suffix(self) -> str:
        numbers = (("sd", self.split_dim), ("eid", self.expert_id), ("sid", self.stage_id))
        named = "".join(f"_{name}{number}" for name, number in numbers if number is not None)
        return f"__{self.kind.name.lower()}_{self.rank}of{self.size}{named}"


@dataclass(frozen=True)
class Layout:
    """The axes of a request in the caller's order, or of a stored part in the header's."""

    axes: tuple[Axis, ...]

    @property
    def tp(self) -> Axis | None:
        return next((axis for axis in self.axes if axis.kind is AxisKind.TP), None)

    @property
    def is_plain_tp(self) -> bool:
        return len(self.axes) == 1 and self.tp is not None

    @property
    def canonical(self) -> tuple[Axis, ...]:
        return tuple(sorted(self.axes, key=lambda axis: axis.kind))

    def of_rank(self, rank: int, size: int) -> Layout:
        """Return the layout of another rank among `size` on the TP axis."""
        return Layout(tuple(_of_rank(axis, rank, size) if axis.kind is AxisKind.TP else axis for axis in self.axes))

    def key(self, base: str) -> str:
        if self.is_plain_tp:
            return tp_key(base, self.axes[0].rank)
        return base + "".join(axis.suffix for axis in self.canonical)

    def stored(self, local_shape: Sequence[int]) -> tuple[StoredAxis, ...]:
        """Return the axes for the header of a part. InvalidInput when the part has no such dimension."""
        return tuple(_stored(axis, position, local_shape) for position, axis in enumerate(self.axes))

    def is_of(self, header: TensorHeader) -> bool:
        """Return whether a stored object is the part that this layout names."""
        return header.is_shard and layout_of(header).canonical == self.canonical


class WriterPartition(NamedTuple):
    """The part that one of several writers stores. A reader asks for the whole tensor, or for a TP part equal to it."""

    rank: int
    size: int
    split_dim: int

    @property
    def layout(self) -> Layout:
        return Layout((Axis(AxisKind.TP, self.rank, self.size, self.split_dim, None, None),))

    def key(self, base: str) -> str:
        return f"{base}__writer_{self.rank}of{self.size}_sd{self.split_dim}"


def tp_key(key: str, rank: int, tp_size: int = 2) -> str:
    """Return the key of one part. A tensor that is not divided has its own key."""
    return key if tp_size <= 1 else f"{key}_tp_{rank}"


def manifest_key(key: str) -> str:
    return f"{key}__parallelism_manifest"


def writer_manifest_key(key: str) -> str:
    return f"{key}__writer_manifest"


def parse_layout(parallelism: Any) -> Layout:
    """Check a request, an object with `axes`. Raise InvalidInput for one that upstream refuses."""
    if not hasattr(parallelism, "axes"):
        raise InvalidInput(f"{type(parallelism).__name__} has no axes")
    axes = tuple(_parse_axis(axis) for axis in parallelism.axes)
    if not 0 < len(axes) <= MAX_AXES or len({axis.kind for axis in axes}) < len(axes):
        raise InvalidInput(f"parallelism takes 1 to {MAX_AXES} axes of different kinds")
    return Layout(axes)


def parse_partition(partition: Any) -> WriterPartition:
    """Check an object with rank, size and split_dim. Raise InvalidInput."""
    try:
        parsed = WriterPartition(int(partition.rank), int(partition.size), int(partition.split_dim))
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInput(f"a writer partition has rank, size and split_dim: {error}") from error
    if not 0 <= parsed.rank < parsed.size or parsed.split_dim < 0:
        raise InvalidInput(f"{parsed} is no writer partition")
    return parsed


def parse_target(target: Any) -> tuple[str, Layout | None]:
    """Return mode and layout of a read; None stands for "as stored". Raise InvalidInput."""
    if target is None:
        return "as_stored", None
    mode, parallelism = getattr(target, "mode", None), getattr(target, "parallelism", None)
    if not isinstance(mode, str) or mode.lower() not in _MODES:
        raise InvalidInput(f"{type(target).__name__} is no ReadTarget")
    return mode.lower(), None if parallelism is None else parse_layout(parallelism)


def layout_of(header: TensorHeader) -> Layout:
    """Return the axes that a header holds."""
    return Layout(
        tuple(
            Axis(
                axis.kind,
                axis.rank,
                axis.count,
                axis.split_dim if axis.split_dim >= 0 else None,
                axis.number if axis.kind is AxisKind.EP else None,
                axis.number if axis.kind is AxisKind.PP else None,
            )
            for axis in header.axes
        )
    )


def plan_write(
    key: str, header: TensorHeader, data: memoryview, layout: Layout | None, partition: WriterPartition | None
) -> list[tuple[str, Parts]]:
    """Return the objects to store for a tensor that a caller passes. With TP as the only axis the tensor is the part
    itself; with more axes, or a partition, the tensor is the whole and the part is cut out.
    """
    if partition is not None:
        cut = whole_cut(header, partition.split_dim, partition.size)
        part = shard(header, data, cut, partition.rank, partition.layout.stored(cut.part_shape))
        return [(partition.key(key), part), (writer_manifest_key(key), _manifest(header, cut))]
    if layout is None:
        return [(key, object_parts(header, data))]
    tp = layout.tp
    if tp is None or tp.split_dim is None:
        marked = replace(header, is_shard=True, axes=layout.stored(header.local_shape))
        return [(layout.key(key), object_parts(marked, data))]
    if layout.is_plain_tp:
        cut = _inferred_cut(header, tp, tp.split_dim)
        axes = layout.stored(header.local_shape)
        part = object_parts(replace(header, global_shape=cut.shape, is_shard=True, axes=axes), data)
    else:
        cut = whole_cut(header, tp.split_dim, tp.size)
        part = shard(header, data, cut, tp.rank, layout.stored(cut.part_shape))
    return [(layout.key(key), part), (manifest_key(key), _manifest(header, cut))]


def plan_write_all(key: str, header: TensorHeader, data: memoryview, layout: Layout) -> list[tuple[str, Parts]]:
    """Return the objects of all TP ranks of a whole tensor, without a manifest: what a write from a pointer stores."""
    tp = layout.tp
    if tp is None or tp.split_dim is None:
        raise InvalidInput("the request has no TP axis")
    cut = whole_cut(header, tp.split_dim, tp.size)
    ranks = [layout.of_rank(rank, tp.size) for rank in range(tp.size)]
    return [
        (each.key(key), shard(header, data, cut, rank, each.stored(cut.part_shape))) for rank, each in enumerate(ranks)
    ]


def _parse_axis(axis: Any) -> Axis:
    try:
        kind = AxisKind[str(axis.kind).upper()]
        numbers = (_integer(getattr(axis, name, None)) for name in ("split_dim", "expert_id", "stage_id"))
        parsed = Axis(kind, int(axis.rank), int(axis.size), *numbers)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"an axis has a kind (tp, dp, ep, pp), rank and size: {error!r}") from error
    if kind is AxisKind.RESERVED or not 0 <= parsed.rank < parsed.size:
        raise InvalidInput(f"an axis cannot have kind {axis.kind}, rank {axis.rank} and size {axis.size}")
    if (parsed.split_dim is not None) != (kind is AxisKind.TP):
        raise InvalidInput("a TP axis needs split_dim, and no other axis takes it")
    if (kind is AxisKind.EP and parsed.expert_id is None) or (kind is AxisKind.PP and parsed.stage_id is None):
        raise InvalidInput("an EP axis needs expert_id, a PP axis needs stage_id")
    return parsed


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)


def _of_rank(axis: Axis, rank: int, size: int) -> Axis:
    return axis._replace(rank=rank, size=size)


def _stored(axis: Axis, position: int, local_shape: Sequence[int]) -> StoredAxis:
    if axis.split_dim is None:
        extent, split_dim = 0, -1
    elif 0 <= axis.split_dim < len(local_shape):
        extent, split_dim = local_shape[axis.split_dim], axis.split_dim
    else:
        raise InvalidInput(f"shape {list(local_shape)} has no dimension {axis.split_dim}")
    number = {AxisKind.EP: axis.expert_id, AxisKind.PP: axis.stage_id}.get(axis.kind) or 0
    return StoredAxis(axis.kind, position, axis.rank, axis.size, split_dim, number, extent)


def _inferred_cut(header: TensorHeader, tp: Axis, split_dim: int) -> Cut:
    """Return the cut of the whole tensor, of which the header describes one of equal parts."""
    shape = list(header.local_shape)
    if not 0 <= split_dim < len(shape):
        raise InvalidInput(f"shape {shape} has no dimension {split_dim}")
    shape[split_dim] *= tp.size
    return Cut(tuple(shape), split_dim, tp.size)


def _manifest(header: TensorHeader, cut: Cut) -> Parts:
    return [memoryview(Manifest(header.element_type, cut.shape, cut.dim, cut.count).pack())]
