"""What an HDF5 file must be before a value is read: all of it in the file itself, packed so that no code is loaded."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

from qpt.data.checks import check_size, clean
from qpt.errors import QptError

if TYPE_CHECKING:
    import h5py  # imported only where an HDF5 file is read: npz does without

_DEEPEST = 32  # groups in groups


def inside(file: h5py.File, key: str) -> Any:
    """What a key such as "infos/cost" names, None if nothing; each part of it must lie in the file itself."""
    import h5py

    place: Any = file
    for part in (name for name in key.split("/") if name not in ("", ".")):
        if not isinstance(place, h5py.Group) or not place.id.links.exists(part.encode()):
            return None
        if place.id.links.get_info(part.encode()).type != h5py.h5l.TYPE_HARD:
            raise QptError(f"{key} is a link to another place; only arrays that lie in the file itself are read")
        place = place[part]
    return place


def first_links(file: h5py.File) -> list[bytes]:
    found: list[bytes] = []
    for name in file.id:
        found.append(name)
        if len(found) == 100:
            break
    return found


def check_layout(name: str, dataset: h5py.Dataset) -> None:
    from h5py import h5d, h5z

    # These cannot be made to load code, as filters from plugins can.
    allowed = {h5z.FILTER_DEFLATE, h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32, h5z.FILTER_LZF}
    properties = dataset.id.get_create_plist()
    if properties.get_layout() not in (h5d.COMPACT, h5d.CONTIGUOUS, h5d.CHUNKED):
        raise QptError(f"{name} is a virtual dataset, whose values lie in other files; copy them into one file")
    if properties.get_external_count() > 0:
        raise QptError(f"{name} is stored outside the file; copy its values into the file")
    filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
    if not set(filters) <= allowed:
        raise QptError(
            f"{name} is packed with a filter that is not gzip or lzf (HDF5 filter {max(filters)}); rewrite it with gzip"
        )
    if len(set(filters)) < len(filters):
        raise QptError(f"{name} is packed with the same filter twice; rewrite it with gzip")


def check_chunks(name: str, dataset: h5py.Dataset, file_size: int, limit: int) -> None:
    """A chunk is unpacked as a whole, whatever its size turns out to be: bound it by what gzip can do."""
    if dataset.chunks is None:
        return
    check_size(f"a chunk of {name}", math.prod(dataset.chunks) * dataset.dtype.itemsize, file_size, limit)
    largest, least = 0, 4 if dataset.fletcher32 else 0  # libhdf5 reads a checksum that is not there, and crashes

    def look(chunk: Any) -> None:
        nonlocal largest
        largest = max(largest, chunk.size)
        if chunk.byte_offset is None or chunk.byte_offset + chunk.size > file_size:
            raise QptError(f"{name} has a part that lies beyond the end of the file; the file is cut short or damaged")
        if chunk.size <= least:
            raise QptError(f"{name} has a part with nothing in it; the file is damaged")

    dataset.id.chunk_iter(look)
    if dataset.compression == "gzip" and largest * 1032 > max(limit, 2**30):  # it may unpack to more than it says
        _check_unpacked(name, dataset)


def _check_unpacked(name: str, dataset: h5py.Dataset) -> None:
    """Unpack every chunk piece by piece, and count."""
    room = math.prod(dataset.chunks) * dataset.dtype.itemsize
    for index in range(dataset.id.get_num_chunks()):
        mask, packed = dataset.id.read_direct_chunk(dataset.id.get_chunk_info(index).chunk_offset)
        inflater, left, size = zlib.decompressobj(), packed, 0
        while left and not mask and not inflater.eof:
            size += len(inflater.decompress(left, 2**20))
            left = inflater.unconsumed_tail
            if size > room:
                raise QptError(f"a chunk of {name} unpacks to more than it may hold; the file is damaged")


def check_tree(group: h5py.Group, file_size: int, limit: int, where: str = "", deep: int = 0) -> int:
    """Check all that lies in a group, whatever its names; the bytes that its arrays take when they are read."""
    import h5py

    if deep > _DEEPEST:  # a group may hold itself
        raise QptError(f"{clean(where[:60])} lies in more than {_DEEPEST} groups; the file is damaged")
    total = 0
    for part in group.id:
        name = where + part.decode(errors="replace")
        if group.id.links.get_info(part).type != h5py.h5l.TYPE_HARD:
            raise QptError(f"{name} is a link to another place; only arrays that lie in the file itself are read")
        found = group[part]
        if isinstance(found, h5py.Group):
            total += check_tree(found, file_size, limit, f"{name}/", deep + 1)
        elif isinstance(found, h5py.Dataset):
            check_layout(name, found)
            total += math.prod(found.shape or ()) * found.dtype.itemsize
            check_chunks(name, found, file_size, limit)
            check_size("the data", total, file_size, limit)
    return total
