"""What a run has read of every corpus, and how it goes on when its mix of data changes.

A *mix* is a set of corpora and the shares in which they take turns. A corpus supplies its samples
from a list of *orders*, each of which visits windows of the corpus once; the first order of a run
is Megatron-LM's. As long as the mix stays, nothing but the number of consumed samples matters.
When it changes, every corpus goes on at the sample where it stopped:

- with the same sequence length in the same order;
- with another sequence length in a new order of what the old one has not visited, cut anew;
- and when that is used up, in new passes over all of its documents.

A checkpoint carries the mix and the number of samples taken of each corpus, so a later run can do
without the files of a corpus that it leaves out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.blend import dataset_targets, with_surplus
from megatron.core.datasets.gpt import Corpus, tokens_digest
from megatron.core.datasets.index import EpochPlan
from megatron.core.errors import DataError, complaint

_BLOCK = 1 << 18
_BLOCKS = 256

Lengths = npt.NDArray[np.int32]


def lengths_digest(lengths: Lengths) -> str:
    """Return a hash of documents' lengths; of a very long list, of evenly spaced blocks."""
    digest = hashlib.blake2b(str(lengths.size).encode(), digest_size=16)
    if lengths.size <= _BLOCK * _BLOCKS:
        digest.update(np.ascontiguousarray(lengths).tobytes())
    else:
        for start in np.linspace(0, lengths.size - _BLOCK, _BLOCKS):
            digest.update(np.ascontiguousarray(lengths[int(start) :][:_BLOCK]).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Order:
    """One order in which windows of a corpus are visited, each once.

    Attributes:
        sequence_length: Tokens a window advances by.
        seed: Seed of the shuffles.
        first: First document.
        count: Number of documents.
        epochs: Passes over them.
        separate_last: Whether the last pass is shuffled by itself.
        rest_of: The order whose unvisited windows are cut anew here, instead of documents.
        read: Windows of it that were visited.
    """

    sequence_length: int
    seed: int
    first: int = 0
    count: int = 0
    epochs: int = 0
    separate_last: bool = False
    rest_of: Order | None = None
    read: int = 0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Order:
        """Read what `dataclasses.asdict` made."""
        inner = saved.get("rest_of")
        return cls(**{**saved, "rest_of": None if inner is None else cls.of(inner)})

    def plan(self, lengths: Lengths) -> EpochPlan:
        """Return the passes over the documents; not for the rest of another order."""
        tokens = int(lengths[self.first : self.first + self.count].sum(dtype=np.int64))
        return EpochPlan.of_epochs(tokens, self.sequence_length, self.epochs, self.separate_last)

    def samples(self, lengths: Lengths) -> int:
        """Return the number of windows."""
        if self.rest_of is None:
            return self.plan(lengths).samples
        left = self.rest_of.samples(lengths) - self.read
        return left * self.rest_of.sequence_length // self.sequence_length

    def documents(self) -> tuple[int, int]:
        """Return the first document and the end of those that are read."""
        if self.rest_of is not None:
            return self.rest_of.documents()
        return self.first, self.first + self.count


@dataclass(frozen=True, kw_only=True)
class Part:
    """One corpus of a mix.

    Attributes:
        name: Last part of its path.
        sequences: Documents (sequences of the index) in its files.
        digest: Hash of their lengths.
        first: First document of the split.
        count: Documents of the split.
        orders: Where its samples come from, one after the other.
        start: Samples of them that were taken before the mix began.
        passes: Orders over documents that were made of it so far, which vary the seed.
        tokens: Tokens read of it before the mix began.
        content: Hash of tokens at a few places, empty in checkpoints that do not have it.
    """

    name: str
    sequences: int
    digest: str
    first: int
    count: int
    orders: tuple[Order, ...] = ()
    start: int = 0
    passes: int = 0
    tokens: int = 0
    content: str = ""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Part:
        """Read what `dataclasses.asdict` made."""
        return cls(**{**saved, "orders": tuple(Order.of(one) for one in saved["orders"])})

    def samples(self, lengths: Lengths) -> int:
        """Return how many samples the mix can take of it."""
        return sum(order.samples(lengths) for order in self.orders) - self.start

    def advanced(self, read: int, sequence_length: int) -> Part:
        """Return the state after the mix has taken `read` samples."""
        tokens = self.tokens + read * sequence_length
        return replace(self, start=self.start + read, tokens=tokens)

    def extended(self, need: int, sequence_length: int, seed: int, lengths: Lengths) -> Part:
        """Return the same with new passes over its documents if there are less than `need`."""
        missing = need - self.samples(lengths)
        if missing <= 0:
            return self
        tokens = int(lengths[self.first : self.first + self.count].sum(dtype=np.int64))
        plan = EpochPlan.of(tokens, sequence_length, missing)
        order = Order(
            sequence_length=sequence_length,
            seed=(seed + self.passes) % (1 << 32),
            first=self.first,
            count=self.count,
            epochs=plan.epochs,
            separate_last=plan.separate_last,
        )
        return replace(self, orders=(*self.orders, order), passes=self.passes + 1)


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What a stretch of a run reads.

    Attributes:
        begin: Samples that the run had consumed before it.
        sequence_length: Tokens of a sample.
        seed: Seed of the run.
        parts: The corpora.
        shares: Their shares of the samples, adding up to 1.
        once: Whether they were listed without weights, to be read once.
        gone: Corpora of earlier mixes that are not in this one.
        done: Corpora of this mix that earlier ones have used up, if they are read once.
    """

    begin: int
    sequence_length: int
    seed: int
    parts: tuple[Part, ...]
    shares: tuple[float, ...]
    once: bool = False
    gone: tuple[Part, ...] = ()
    done: tuple[Part, ...] = ()

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Mix:
        """Read what `dataclasses.asdict` made."""
        lists = {
            name: tuple(Part.of(one) for one in saved[name]) for name in ("parts", "gone", "done")
        }
        return cls(**{**saved, **lists, "shares": tuple(saved["shares"])})

    def with_samples(self, count: int, lengths: Sequence[Lengths]) -> Mix:
        """Return the mix with enough orders for `count` samples.

        Raises:
            DataError: Corpora that are read once do not last.
        """
        if self.once:
            have = sum(p.samples(n) for p, n in zip(self.parts, lengths, strict=True))
            if have < count:
                why = f"Each is read once, which leaves {have} samples, but the run reads {count}"
                fix = "Give weights (repetition is then allowed) or read fewer samples"
                got = f"{len(self.parts)} corpora without weights"
                raise DataError(complaint("--data-path", got, why, fix))
            return self
        needs = [count]
        if len(self.parts) > 1:
            needs = [with_surplus(n) for n in dataset_targets(self.shares, count)]
        parts = tuple(
            part.extended(need, self.sequence_length, self.seed, own)
            for part, need, own in zip(self.parts, needs, lengths, strict=True)
        )
        return replace(self, parts=parts)


def keys(parts: Sequence[Part]) -> list[tuple[str, str, int]]:
    """Return what identifies each corpus: name, content and which of several equal ones it is."""
    seen: list[tuple[str, str]] = []
    found = []
    for part in parts:
        seen.append((part.name, part.digest + part.content))
        found.append((*seen[-1], seen.count(seen[-1])))
    return found


# How a corpus of a checkpoint is known again: as it was, as it was if the checkpoint does not say
# which tokens it had, and under another name.
_KNOWN: tuple[Callable[[Part, Part], bool], ...] = (
    lambda old, new: (old.name, old.digest, old.content) == (new.name, new.digest, new.content),
    lambda old, new: not old.content and (old.name, old.digest) == (new.name, new.digest),
    lambda old, new: (old.digest, old.content) == (new.digest, new.content),
)


def recognized(old: Mix, new: Mix) -> tuple[Mix, list[str]]:
    """Return a mix with its corpora called as they are in another, and say which got a new name."""
    held, free = [*old.parts, *old.done, *old.gone], list(new.parts)
    found: dict[int, Part] = {}
    for same in _KNOWN:
        for place, part in enumerate(held):
            match = next((one for one in free if same(part, one)), None)
            if match is not None and place not in found:
                free.remove(match)
                found[place] = replace(part, name=match.name, content=match.content)
    names = [
        f"{held[place].name} is now called {part.name}"
        for place, part in found.items()
        if held[place].name != part.name
    ]
    now = [found.get(place, part) for place, part in enumerate(held)]
    rest = len(old.parts) + len(old.done)
    parts, done, gone = now[: len(old.parts)], now[len(old.parts) : rest], now[rest:]
    return replace(old, parts=tuple(parts), done=tuple(done), gone=tuple(gone)), names


def differences(old: Mix, new: Mix) -> list[str]:
    """Say in words what distinguishes two mixes; the number of samples does not count."""
    found = [
        f"{flag} {was} became {now}"
        for flag, was, now in (
            ("--seq-length", old.sequence_length, new.sequence_length),
            ("--seed", old.seed, new.seed),
        )
        if was != now
    ]
    known = old.parts + old.done
    was_share = (*old.shares, *(0.0 for _ in old.done))
    before = dict(zip(keys(known), zip(known, was_share, strict=True), strict=True))
    after = dict(zip(keys(new.parts), zip(new.parts, new.shares, strict=True), strict=True))
    left = [key for key in before if key not in after]
    for key, (part, _) in after.items():
        if key in before:
            was = before[key][0]
            if (was.first, was.count) != (part.first, part.count):
                found.append(f"the split takes other documents of {part.name}")
            continue
        same = next((one for one in left if one[0] == key[0]), None)
        if same is not None:
            left.remove(same)
            counts = (before[same][0].sequences, part.sequences)
            grown = "{} went from {} to {} documents".format(part.name, *counts)
            found.append(grown if len(set(counts)) > 1 else f"{part.name} has other documents")
        else:
            found.append(f"{part.name} is new")
    found += [f"{name} is gone" for name, _, _ in left]
    if old.once != new.once:
        found.append("weights were given" if old.once else "weights are gone")
    elif before.keys() == after.keys() and not new.once:
        found += [
            f"the share of {key[0]} went from {before[key][1]:.4g} to {share:.4g}"
            for key, (_, share) in after.items()
            if before[key][1] != share
        ]
    return found


@dataclass
class Record:
    """What a checkpoint says about the data.

    Attributes:
        mix: What the run read last.
        consumed: Samples that the run had consumed.
        read: Samples that the mix had taken of each part.
        past: Earlier mixes: where they began and ended, and what they took.
        evaluated: The corpora of each validation set, in words.
    """

    mix: Mix
    consumed: int
    read: list[int]
    past: list[dict[str, Any]] = field(default_factory=list)
    evaluated: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Record:
        """Read what `to_dict` made."""
        sets = {name: list(words) for name, words in saved.get("evaluated", {}).items()}
        return cls(Mix.of(saved["mix"]), saved["consumed"], saved["read"], saved["past"], sets)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def closed(self) -> list[dict[str, Any]]:
        """Return the earlier mixes together with this one."""
        last = {
            "begin": self.mix.begin,
            "end": self.consumed,
            "sequence_length": self.mix.sequence_length,
            "samples": [[p.name, n] for p, n in zip(self.mix.parts, self.read, strict=True)],
        }
        return [*self.past, last]


def continued(record: Record, new: Mix, corpora: Sequence[Corpus], target: int) -> Mix:
    """Return the mix that goes on with `new` where the recorded one stopped.

    Args:
        record: What the checkpoint says.
        new: The mix of this run, as one that begins at sample 0.
        corpora: Its corpora.
        target: Samples of the whole run.

    Raises:
        DataError: A corpus cannot go on.
    """
    old = record.mix
    held = [
        part.advanced(read, old.sequence_length)
        for part, read in zip(old.parts, record.read, strict=True)
    ] + [*old.gone, *old.done]
    parts, lengths = [], [corpus.sequence_lengths for corpus in corpora]
    for part, corpus, own in zip(new.parts, corpora, lengths, strict=True):
        before = _found(part, held, corpus)
        if before is None:
            fresh = replace(part, orders=part.orders if new.once else (), passes=int(new.once))
            parts.append(fresh)
        else:
            held.remove(before)
            parts.append(_renewed(before, part, new, own))
    shares, done = new.shares, []
    if new.once:
        sizes = [part.samples(own) for part, own in zip(parts, lengths, strict=True)]
        lengths = [own for own, size in zip(lengths, sizes, strict=True) if size]
        done = [part for part, size in zip(parts, sizes, strict=True) if not size]
        parts = [part for part, size in zip(parts, sizes, strict=True) if size]
        shares = tuple(size / sum(sizes) for size in sizes if size)
    mix = replace(
        new,
        begin=record.consumed,
        parts=tuple(parts),
        shares=shares,
        gone=tuple(held),
        done=tuple(done),
    )
    return mix.with_samples(target - record.consumed, lengths)


def _found(part: Part, held: Sequence[Part], corpus: Corpus) -> Part | None:
    """Return the state of a corpus, grown or not, among those that were read before."""
    for one in held:
        if (one.name, one.digest, one.content) == (part.name, part.digest, part.content):
            return one
    for one in held:
        if one.name != part.name or one.sequences > part.sequences:
            continue
        if lengths_digest(corpus.sequence_lengths[: one.sequences]) == one.digest and (
            not one.content or tokens_digest(corpus, one.sequences) == one.content
        ):
            return one
    return None


def _renewed(before: Part, part: Part, mix: Mix, lengths: Lengths) -> Part:
    """Return a corpus at the place where it stopped, for samples of another mix."""
    taken, live = before.start, None
    for order in before.orders:
        size = order.samples(lengths)
        if taken < size:
            live = order
            break
        taken -= size
    if live is not None and live.rest_of is None and not taken and not mix.once:
        live = None  # nothing was read of it: a new pass does as well
    if live is not None:
        first, end = live.documents()
        if first < part.first or end > part.first + part.count:
            why = f"Training has read documents {first} to {end - 1} of it, and is to go on"
            fix = "Leave --split as it was, so that no document changes sides"
            now = f"documents {part.first} to {part.first + part.count - 1} for training"
            raise DataError(complaint(f"--data-path {part.name}", now, why, fix))
    orders = [] if live is None else [live]
    start = 0 if live is None else taken
    if live is not None and live.sequence_length != mix.sequence_length:
        rest = Order(sequence_length=mix.sequence_length, seed=mix.seed, rest_of=live, read=taken)
        start, orders = 0, [rest] if rest.samples(lengths) else []
    passes = before.passes
    added = part.first + part.count - (before.first + before.count)
    if before.digest != part.digest and added > 0:
        order = Order(
            sequence_length=mix.sequence_length,
            seed=(mix.seed + passes) % (1 << 32),
            first=before.first + before.count,
            count=added,
            epochs=1,
        )
        tokens = int(lengths[order.first : order.first + added].sum(dtype=np.int64))
        if tokens > mix.sequence_length:
            orders, passes = [*orders, order], passes + 1
    return replace(part, orders=tuple(orders), start=start, passes=passes, tokens=before.tokens)
