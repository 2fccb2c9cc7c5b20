"""An object store for tests, ``flat://bucket/...``: several processes share it through a folder.

It behaves as the real ones do where that matters: names have no directories, an object is there
whole once the file that writes it is closed, nothing can be renamed, listings come from a cache
until that is invalidated, and what fails raises errors of its own kind.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem

from megatron.core.dist_checkpointing import lock, store


class ThrottledError(Exception):
    """What a store says when it is asked too much; no `OSError`, like botocore's."""


class FlatStore(AbstractFileSystem):
    """Objects as files of one folder, by their quoted names.

    Attributes:
        home: The folder.
        before: Called before every change with what is done ("piece" when the first
            one comes, "put" when it is whole, "copy", "remove") and
            the object's name.
        asked: Called before every answer with what is asked for ("list", "head", "get") and the
            name.
    """

    protocol = "flat"
    home: Path = Path()
    before: Callable[[str, str], None] = staticmethod(lambda what, key: None)
    asked: Callable[[str, str], None] = staticmethod(lambda what, key: None)
    cachable = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._listed: dict[str, list[dict[str, Any]]] = {}

    def _file(self, key: str) -> Path:
        return self.home / quote(self._strip_protocol(key), safe="")

    def _keys(self) -> dict[str, int]:
        bucket = [p for p in self.home.iterdir() if not p.name.endswith(".part")]
        found = {}
        for path in bucket:
            try:
                found[unquote(path.name)] = path.stat().st_size
            except FileNotFoundError:
                continue  # removed meanwhile
        return found

    def invalidate_cache(self, path: str | None = None) -> None:
        self._listed.clear()

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path).rstrip("/")
        if path not in self._listed:
            self.asked("list", path)
            found: dict[str, dict[str, Any]] = {}
            for key, size in sorted(self._keys().items()):
                if key == path:
                    found[key] = {"name": key, "size": size, "type": "file"}
                elif key.startswith(path + "/"):
                    name, more, _ = key[len(path) + 1 :].partition("/")
                    kind = "directory" if more else "file"
                    entry = {"name": f"{path}/{name}", "size": 0 if more else size, "type": kind}
                    found[entry["name"]] = entry
            if not found:
                raise FileNotFoundError(path)
            self._listed[path] = list(found.values())
        entries = self._listed[path]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        key = self._strip_protocol(path)
        self.asked("head", key)
        try:
            return {"name": key, "size": self._file(key).stat().st_size, "type": "file"}
        except FileNotFoundError:
            if any(name.startswith(key + "/") for name in self._keys()):
                return {"name": key, "size": 0, "type": "directory"}
            raise FileNotFoundError(key) from None

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        key = self._strip_protocol(path)
        if mode == "wb":
            return _Put(self, key)
        self.asked("get", key)
        try:
            return self._file(key).open("rb")
        except FileNotFoundError:
            raise FileNotFoundError(key) from None

    def put(self, key: str, data: bytes) -> None:  # type: ignore[override]
        self.before("put", key)
        part = self.home / f"{os.getpid()}-{quote(key, safe='')}.part"
        part.write_bytes(data)
        os.replace(part, self._file(key))

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        target = self._strip_protocol(path2)
        self.before("copy", target)
        data = self._file(path1).read_bytes()
        part = self.home / f"{os.getpid()}-{quote(target, safe='')}.part"
        part.write_bytes(data)
        os.replace(part, self._file(target))

    def rm_file(self, path: str) -> None:
        key = self._strip_protocol(path)
        self.before("remove", key)
        try:
            self._file(key).unlink()
        except FileNotFoundError:
            raise FileNotFoundError(key) from None

    def mv(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError("objects cannot be renamed")

    rename = mv
    mkdir = makedirs = rmdir = mv


class _Put(io.BytesIO):
    """An object on its way: there once it is closed."""

    def __init__(self, store: FlatStore, key: str) -> None:
        super().__init__()
        self._store, self._key = store, key

    def write(self, data: Any) -> int:
        if not self.tell():
            self._store.before("piece", self._key)
        return super().write(data)

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._store.put(self._key, data)


def install(home: Path) -> None:
    """Register the store, with an empty folder for its objects."""
    fsspec.register_implementation("flat", FlatStore, clobber=True)
    home.mkdir(parents=True, exist_ok=True)
    FlatStore.home = home
    FlatStore.before = staticmethod(lambda what, key: None)
    FlatStore.asked = staticmethod(lambda what, key: None)


def without_pauses(tmp_path: Path, monkeypatch: Any) -> None:
    """Install a store that nobody waits for, and work in the folder beside it."""
    monkeypatch.setattr(store, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(lock, "SETTLE_S", 0.0)
    monkeypatch.setattr(store, "_REACHED", {})
    install(tmp_path / "stores" / "first")
    monkeypatch.chdir(tmp_path)
