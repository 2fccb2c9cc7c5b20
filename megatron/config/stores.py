"""How a place in an object store is written, to tell it from a path of the file system."""

from __future__ import annotations

import re

SEPARATOR = "://"
ON_DISK = ("file", "local")  # protocols of the file system itself
# One protocol, then a bucket or host; what fsspec takes for a pattern could name other objects.
_FORM = re.compile(r"[a-z][a-z0-9+.-]*://[^/*?\[\]:][^*?\[\]]*", re.IGNORECASE)
WHY = "A place in a store is one protocol, a bucket or host, and names, without * ? [ ]"
FIX = "Write it like s3://bucket/run"


def in_store(place: str) -> bool:
    """Whether a place is in a store."""
    protocol, separator, _ = place.partition(SEPARATOR)
    return bool(separator) and protocol not in ON_DISK


def has_form(place: str) -> bool:
    """Whether a place in a store can be one."""
    return "::" not in place and _FORM.fullmatch(place) is not None
