"""``PREFIX.meta.json``: which tokenizer a corpus was written with.

Nothing needs it to read a corpus, and Megatron-LM knows no such file. Where it is there, a corpus
of another vocabulary is found before it is mixed with others or trained on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.datasets.tokenizers import Tokenizer
from megatron.core.errors import DataError, complaint
from megatron.core.files import sync, sync_directory

ENDING = ".meta.json"
_FORMAT = 1
_PIECES = 4096  # so many ids stand for the vocabulary
_PROBE = (
    "The quick brown fox doesn't jump over 1234567890 lazy dogs; naïve café, Straße, fjörd...\n\n"
    "\tdef f(x: int) -> str:\n        return f\"{x!r}\" + 'a' * 3  # 3.14e-10 <|x|> [INST] </s>\n"
    "Съешь же ещё этих мягких французских булок. Γειά σου Κόσμε. 你好，世界！日本語のテキスト。"
    "안녕하세요. مرحبا بالعالم. नमस्ते दुनिया ∑ √2 ≠ € 🙂👩‍💻 https://example.org/?q=a&b=c_d "
    "internationalization antidisestablishmentarianism \\frac{a}{b} SELECT * FROM t WHERE id >= 7;"
)
_NO_TEXT = "NullTokenizer"


def path_of(prefix: str | os.PathLike[str]) -> Path:
    """Return where the file of a corpus is."""
    return Path(f"{os.fspath(prefix)}{ENDING}")


@functools.lru_cache(maxsize=4)
def _hashes(tokenizer: Tokenizer) -> dict[str, str]:
    """Hash the ids of a text in many scripts, and what up to 4096 ids stand for."""
    if tokenizer.name == _NO_TEXT:
        return {}
    step = -(-tokenizer.vocab_size // _PIECES)
    pieces = [tokenizer.detokenize([i]) for i in range(0, tokenizer.vocab_size, step)]
    parts = {"probe": tokenizer.tokenize(_PROBE), "pieces": pieces}
    return {n: hashlib.sha256(json.dumps(v).encode()).hexdigest() for n, v in parts.items()}


def describe(tokenizer: Tokenizer, **options: Any) -> dict[str, Any]:
    """Return what the file says.

    Args:
        tokenizer: What the corpus was written with.
        options: What else its tokens depend on.
    """
    return {
        "format": _FORMAT,
        "tokenizer_type": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        **_hashes(tokenizer),
        **options,
    }


def write(prefix: str | os.PathLike[str], origin: Mapping[str, Any]) -> None:
    """Write the file; at no moment is there half of it."""
    path = path_of(prefix)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        json.dump(origin, file, indent=1)
        file.write("\n")
        sync(file)
    os.replace(temporary, path)
    sync_directory(path.parent)


def forget(prefix: str | os.PathLike[str]) -> None:
    """Remove the file before its corpus is replaced."""
    path_of(prefix).unlink(missing_ok=True)


def read(prefix: str | os.PathLike[str], flag: str) -> dict[str, Any] | None:
    """Return what the file of a corpus says, None where there is none.

    Args:
        prefix: The corpus.
        flag: What named it, for messages.

    Raises:
        DataError: It is not understood.
    """
    path = path_of(prefix)
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            complaint(flag, path, f"It cannot be read ({error})", "Repair or remove it")
        ) from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise DataError(
            complaint(flag, path, "It is of another release", "Remove it, or use that release")
        )
    return found


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say how two corpora, or a corpus and a tokenizer, differ; empty if they do not.

    Vocabularies that two types of tokenizer read are compared by what they make of a text.

    Args:
        one: What `read` or `describe` returned.
        other: The same of the other.
    """
    same_type = one["tokenizer_type"] == other["tokenizer_type"]
    if same_type:
        names = ["vocab_size", "probe", "pieces", "append_eod"]
    else:
        names = ["probe", "append_eod"]
    for name in names:
        if name in one and name in other and one[name] != other[name]:
            kind = other["tokenizer_type"] if same_type else ""
            if name in ("probe", "pieces"):
                between = f"two vocabularies of {kind}" if same_type else (
                    f"vocabularies of {one['tokenizer_type']} and {other['tokenizer_type']}"
                )  # fmt: skip
                return f"they are {between} that give the same text other ids"
            return f"{name} is {one[name]} and {other[name]}"
    return ""


def check(prefix: str, tokenizer: Tokenizer, flag: str) -> None:
    """Refuse a corpus that says that it was written with another tokenizer than the run's.

    Args:
        prefix: The corpus.
        tokenizer: The run's.
        flag: What named the corpus.

    Raises:
        DataError: They contradict each other.
    """
    found = read(prefix, flag)
    if found is None:
        return
    why = difference(found, describe(tokenizer))
    if not why and found["vocab_size"] > tokenizer.vocab_size:
        why = f"vocab_size is {found['vocab_size']} and {tokenizer.vocab_size}"
    if why:
        raise DataError(
            complaint(
                flag,
                prefix,
                f"Its {ENDING} file and this run's tokenizer do not agree: {why}",
                "Give the tokenizer that the corpus was written with; or remove that file if it "
                "belongs to another corpus",
            )
        )
