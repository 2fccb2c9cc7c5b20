"""Reading pickles, and torch's archives of pickles and tensors, without running what they ask for.

A pickle names the objects that it is made of, and Python calls whatever it names. Here a name is
one of three things: something on a fixed list that is built (tensors, plain containers,
`argparse.Namespace`), a type of a library that writes checkpoints, of which an empty `Opaque`
stands in the result, or a reason to refuse the file. Nothing is imported because a file says so.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import io
import pathlib
import pickle
import types
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.errors import UnusableCheckpointError

_LOCAL_HEADER = 30  # bytes of a zip entry before its name
_HEAP_TYPE = 1 << 9  # of the flags of a class: written in Python, so its attributes can be set
_BROKEN = (EOFError, AttributeError, ValueError, TypeError, KeyError, IndexError, RuntimeError,
           AssertionError, OverflowError, UnicodeDecodeError, ImportError, MemoryError,
           zlib.error)  # fmt: skip


class Opaque:
    """Stands for an object whose type is not built here; forgets everything it is given."""

    qualified = ""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept and forget everything."""

    def __new__(cls, *args: object, **kwargs: object) -> Opaque:
        """Accept and forget everything."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Forget the state too."""

    def append(self, item: object) -> None:
        """Forget list items."""

    def extend(self, items: object) -> None:
        """Forget list items."""

    def add(self, item: object) -> None:
        """Forget set items."""

    def __setitem__(self, key: object, item: object) -> None:
        """Forget dictionary items."""


class Forbidden(pickle.UnpicklingError):
    """A pickle names something that it has no business to name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


# Whose types occur in checkpoints beside the tensors: enumerations, optimizer settings, states of
# random generators. `prefix.` stands for everything below.
_OPAQUE_PREFIXES = (
    "megatron.", "transformer_engine.", "transformer_engine_torch.", "nvidia_resiliency_ext.",
    "apex.", "nemo.", "omegaconf.", "torch.nn.", "torch.optim.", "numpy.core.multiarray.",
    "numpy._core.multiarray.", "numpy.dtypes.",
)  # fmt: skip
_OPAQUE = {
    ("_io", "BytesIO"),
    ("collections", "Counter"),
    ("collections", "defaultdict"),
    ("collections", "deque"),
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("functools", "partial"),
    ("io", "BytesIO"),
    *(("numpy", name) for name in ("bool_", "dtype", "float32", "float64", "int64", "ndarray")),
    ("signal", "Signals"),
    ("torch._C._nn", "gelu"),
    ("torch", "Generator"),
    ("torch", "relu"),
    ("torch", "sigmoid"),
    ("torch", "tanh"),
    ("transformer_engine_torch", "DType"),
    ("types", "SimpleNamespace"),
    ("uuid", "UUID"),
}
_BUILT: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "PurePosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): str,
    **{
        ("builtins", name): getattr(builtins, name)
        for name in ("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int",
                     "list", "set", "str", "tuple")
    },
}  # fmt: skip


def _member(owner: object, name: object) -> Opaque:
    """Stand for the member of an enumeration, to Python 3.11 `getattr(type, name)`."""
    if isinstance(owner, type) and issubclass(owner, Opaque):
        return Opaque()
    raise Forbidden(f"builtins.getattr({owner!r}, {name!r})")


class _Storage:
    """Untyped bytes of an archive and the type of the elements in them."""

    def __init__(self, data: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.data, self.dtype = data, dtype


def _tensor(
    storage: object, offset: int, size: Sequence[int], stride: Sequence[int], *rest: object
) -> Tensor:
    """Make a view of a storage; hooks and whether it requires a gradient are left out."""
    return _typed(storage, None, offset, size, stride)


def _tensor_of_type(
    storage: object, offset: int, size: Sequence[int], stride: Sequence[int],
    requires_grad: object, hooks: object, dtype: object, *rest: object,
) -> Tensor:  # fmt: skip
    """The same for types that have no storage class of their own."""
    return _typed(storage, dtype, offset, size, stride)


def _typed(
    storage: object, dtype: object, offset: int, size: Sequence[int], stride: Sequence[int]
) -> Tensor:
    dtype = dtype or getattr(storage, "dtype", None)
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError("a tensor has no storage")
    return torch.empty(0, dtype=dtype).set_(storage.data, offset, tuple(size), tuple(stride))


def _parameter(data: object, *rest: object) -> object:
    """A parameter is its tensor here; its Python attributes are left out."""
    return data


def _bytes(text: str, encoding: str) -> bytes:
    """Bytes, as pickles of the protocol that torch writes hold them."""
    return text.encode("latin1")


_BUILT |= {
    ("_codecs", "encode"): _bytes,
    ("builtins", "getattr"): _member,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_type,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
    "UntypedStorage": torch.uint8,
}
for _module in ("torch", "torch.cuda", "torch.storage"):
    _BUILT |= {(_module, name): dtype for name, dtype in _STORAGES.items()}


def _own(value: Any) -> Any:
    """Return a copy of what a pickle may name: it can also set attributes of it.

    Those of a class that this process uses (`parent` of paths, say) would change what happens here.
    """
    if isinstance(value, types.FunctionType):
        return partial(value)
    if isinstance(value, type) and value.__flags__ & _HEAP_TYPE:
        names = {"__module__": value.__module__, "__reduce_ex__": partialmethod(_reduced, value)}
        return type(value.__name__, (value,), names)
    return value


def _reduced(self: object, base: Any, protocol: Any) -> tuple[Any, ...]:
    """Say how to pickle an object of a copy of a class: as one of the class itself."""
    how, args, *rest = base.__reduce_ex__(self, protocol)
    made, *given = args if how.__name__ == "__newobj__" else (how, *args)
    return base if made is type(self) else made, tuple(given), *rest


class SafeUnpickler(pickle.Unpickler):
    """An unpickler that can only build what is on the lists above."""

    storage: Callable[[str], torch.UntypedStorage] | None = None

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name.

        Raises:
            Forbidden: The name is on no list.
        """
        module = "builtins" if module == "__builtin__" else module  # Python 2's name for it
        if (module, name) in _BUILT:
            return _own(_BUILT[module, name])
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _OPAQUE or f"{module}.".startswith(_OPAQUE_PREFIXES):
            return type("Opaque", (Opaque,), {"qualified": f"{module}.{name}"})
        raise Forbidden(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage that an archive's pickle refers to."""
        if self.storage is None or not isinstance(pid, tuple) or pid[0] != "storage":
            raise pickle.UnpicklingError(f"a reference to {pid!r}, which is not in the file")
        dtype = pid[1]
        if not isinstance(dtype, torch.dtype):
            raise Forbidden(f"a storage of type {dtype!r}")
        return _Storage(self.storage(str(pid[2])), dtype)


def refusal(name: str, error: Forbidden) -> UnusableCheckpointError:
    """Say that a file was refused, and what to do.

    Args:
        name: The file or entry.
        error: What it named.
    """
    return UnusableCheckpointError(
        f"{name}: refused, because it asks for {error.name}, which has no place in a checkpoint. "
        "Nothing of it was run",
        fix="Do not open this file with other programs unless you trust its author; if you do, "
        "load it there and save it again as tensors and plain values",
    )


def load(source: bytes | Path, name: str | None = None) -> Any:
    """Read what ``torch.save`` wrote.

    Args:
        source: The bytes, or a file. Tensors of a file are views of it, mapped and read when they
            are used; the checksums that the archive has of its parts are compared first.
        name: What it is, for messages; a file's path by default.

    Raises:
        UnusableCheckpointError: It is damaged, no such archive, or asks for what is not allowed.
    """
    name = name or str(source)
    try:
        with zipfile.ZipFile(source if isinstance(source, Path) else io.BytesIO(source)) as archive:
            damaged = archive.testzip()
            if damaged is not None:
                raise UnusableCheckpointError(f"{name}: it is damaged (checksum of {damaged}).")
            return _load_archive(archive, _bytes_of(source))
    except Forbidden as error:
        raise refusal(name, error) from error
    except OSError as error:
        raise UnusableCheckpointError(f"{name}: cannot read it ({error.strerror}).") from error
    except zipfile.BadZipFile as error:
        raise UnusableCheckpointError(f"{name}: {_no_archive(source, error)}.") from error
    except (pickle.UnpicklingError, *_BROKEN) as error:
        raise UnusableCheckpointError(f"{name}: it is damaged ({error}).") from error


def _bytes_of(source: bytes | Path) -> torch.UntypedStorage:
    if isinstance(source, Path):
        data = torch.from_file(str(source), size=source.stat().st_size, dtype=torch.uint8)
        return data.untyped_storage()
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).untyped_storage()


def _no_archive(source: bytes | Path, error: Exception) -> str:
    if isinstance(source, Path):
        with source.open("rb") as file:
            start = file.read(2)
    else:
        start = source[:2]
    if start == b"\x80\x02":
        return (
            "it is damaged, or in the format that torch wrote before version 1.6; load and save it "
            "again with a newer torch"
        )
    return f"it is damaged: no complete archive of torch.save ({error})"


def _load_archive(archive: zipfile.ZipFile, content: torch.UntypedStorage) -> Any:
    entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "data.pkl" not in entries:
        raise ValueError("it holds no data.pkl")
    if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
        raise ValueError("it was written on a machine of the other byte order")
    known: dict[str, torch.UntypedStorage] = {}

    def storage(key: str) -> torch.UntypedStorage:
        if key not in known:
            info = entries[f"data/{key}"]
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"data/{key} is compressed")
            at = info.header_offset
            header = bytes(content[at : at + _LOCAL_HEADER].tolist())
            names, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
            start = at + _LOCAL_HEADER + names + extra
            known[key] = content[start : start + info.file_size]
        return known[key]

    unpickler = SafeUnpickler(io.BytesIO(archive.read(entries["data.pkl"])))
    unpickler.storage = storage
    return unpickler.load()
