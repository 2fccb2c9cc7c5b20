"""Which layers each pipeline stage holds.

Pure arithmetic on settings, so that a layout is judged before anything is built. A rank may hold
several stages (virtual stages): stage `s` lives on rank `s % pipeline_size`, and stages are
numbered in the order in which a batch passes through them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        index: Its number, 0 for the first one.
        first_layer: Its first transformer layer, counted from 0 over the whole model.
        last_layer: The layer after its last one.
        embedding: Whether it turns tokens into activations.
        loss: Whether it has the final norm, the output layer and the loss.
    """

    index: int
    first_layer: int
    last_layer: int
    embedding: bool
    loss: bool

    @property
    def num_layers(self) -> int:
        """Number of its transformer layers."""
        return self.last_layer - self.first_layer


class PlacementError(ValueError):
    """Layers cannot be placed as asked.

    Attributes:
        flags: The settings involved, the wrong one first.
        got: Their values.
        why: Why it cannot work.
        fix: What to do.
    """

    def __init__(self, flags: tuple[str, ...], got: object, why: str, fix: str) -> None:
        super().__init__(f"{', '.join(flags)}: got {got}. {why}. {fix}.")
        self.flags, self.got, self.why, self.fix = flags, got, why, fix


_PP = "--pipeline-model-parallel-size"
_VPP = "--num-virtual-stages-per-pipeline-rank"
_LAYERS_PER = "--num-layers-per-virtual-pipeline-stage"
_LAYOUT = "--pipeline-model-parallel-layout"
_FIRST = "--decoder-first-pipeline-num-layers"
_LAST = "--decoder-last-pipeline-num-layers"
_EMBEDDING = "--account-for-embedding-in-pipeline-split"
_LOSS = "--account-for-loss-in-pipeline-split"


def whole_model(num_layers: int) -> Stage:
    """Return the only stage of a model that is not split."""
    return Stage(0, 0, num_layers, embedding=True, loss=True)


def stages_of(c: Any) -> tuple[Stage, ...]:
    """Return every stage of the pipeline, in order.

    Args:
        c: Anything with the settings' names.

    Raises:
        PlacementError: The layers cannot be placed as asked.
    """
    if c.pipeline_model_parallel_layout is not None:
        return _from_layout(c)
    pp = c.pipeline_model_parallel_size
    if pp == 1:
        return (whole_model(c.num_layers),)
    virtual = virtual_size_of(c)
    per_rank = _uneven(c, pp) if _is_uneven(c) else _even(c, pp, virtual)
    counts = [count // virtual for _ in range(virtual) for count in per_rank]
    # A place that is reserved for the embedding or the loss is one layer less.
    counts[0] -= c.account_for_embedding_in_pipeline_split
    counts[-1] -= c.account_for_loss_in_pipeline_split
    return _numbered(counts)


def stages_of_rank(stages: Sequence[Stage], pipeline_size: int, rank: int) -> tuple[Stage, ...]:
    """Return the stages that one pipeline rank holds, in order."""
    return tuple(s for s in stages if s.index % pipeline_size == rank)


def virtual_size_of(c: Any) -> int:
    """Return the number of stages that a rank holds.

    Raises:
        PlacementError: It does not follow from the settings.
    """
    pp = c.pipeline_model_parallel_size
    if c.pipeline_model_parallel_layout is not None:
        return len(_from_layout(c)) // pp
    if c.num_virtual_stages_per_pipeline_rank is not None:
        return int(c.num_virtual_stages_per_pipeline_rank)
    size = c.num_layers_per_virtual_pipeline_stage
    if size is None or pp == 1:
        return 1
    if _is_uneven(c):
        raise PlacementError(
            (_LAYERS_PER, _FIRST, _LAST),
            f"{size} with an uneven split",
            "Ranks with other numbers of layers have stages of other sizes",
            f"Give the number of stages instead, with {_VPP}",
        )
    per_rank = _total(c) // pp
    if per_rank % size or per_rank == 0:
        raise PlacementError(
            (_LAYERS_PER, "--num-layers", _PP),
            f"{size} with {per_rank} layers a rank",
            "A rank's layers split evenly into its stages",
            f"Choose a divisor of {per_rank}",
        )
    return per_rank // size


def _is_uneven(c: Any) -> bool:
    return (
        c.decoder_first_pipeline_num_layers is not None
        or c.decoder_last_pipeline_num_layers is not None
    )


def _total(c: Any) -> int:
    """Places for layers, of which the embedding and the loss may take one each."""
    accounted = c.account_for_embedding_in_pipeline_split + c.account_for_loss_in_pipeline_split
    return int(c.num_layers + accounted)


def _even(c: Any, pp: int, virtual: int) -> list[int]:
    total, stages = _total(c), pp * virtual
    if total % stages or total // stages < 1:
        extra = total - c.num_layers
        places = f"{c.num_layers} layers" + (f" and {extra} reserved places" if extra else "")
        below = total // stages * stages - extra
        near = [str(n) for n in (below, below + stages) if n > 0]
        raise PlacementError(
            ("--num-layers", _PP, *((_VPP,) if virtual > 1 else ())),
            f"{places} over {stages} stages",
            "Every stage holds the same number of layers",
            f"Set --num-layers {' or '.join(near)}, choose another {_PP}, or place layers by hand "
            f"with {_FIRST}, {_LAST} or {_LAYOUT}",
        )
    return [total // pp] * pp


def _uneven(c: Any, pp: int) -> list[int]:
    first, last = c.decoder_first_pipeline_num_layers, c.decoder_last_pipeline_num_layers
    given = [(flag, n) for flag, n in ((_FIRST, first), (_LAST, last)) if n is not None]
    virtual = virtual_size_of(c)
    flags = tuple(flag for flag, _ in given)
    if c.account_for_embedding_in_pipeline_split or c.account_for_loss_in_pipeline_split:
        raise PlacementError(
            (*flags, _EMBEDDING, _LOSS),
            "both",
            "The uneven split says how many layers the ends have; there is nothing to account for",
            f"Remove {_EMBEDDING} and {_LOSS}",
        )
    rest, ranks = c.num_layers - sum(n for _, n in given), pp - len(given)
    if ranks == 0 and rest == 0:
        between = 0
    elif ranks < 1 or rest < ranks or rest % ranks:
        raise PlacementError(
            (*flags, "--num-layers", _PP),
            f"{' and '.join(str(n) for _, n in given)} of {c.num_layers} layers over {pp} ranks",
            f"{rest} layers are left for the other {ranks} ranks, which hold equal numbers",
            "Choose numbers that leave a multiple",
        )
    else:
        between = rest // ranks
    counts = [between] * pp
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    for flag, count in ((_FIRST, counts[0]), (_LAST, counts[-1]), (_PP, between)):
        if count % virtual:
            raise PlacementError(
                (flag, _VPP),
                f"{count} layers and {virtual}",
                "A rank's layers split evenly into its stages",
                f"Use a multiple of {virtual}",
            )
    return counts


def _numbered(counts: Sequence[int]) -> tuple[Stage, ...]:
    stages, first, last = [], 0, len(counts) - 1
    for index, count in enumerate(counts):
        stages.append(Stage(index, first, first + count, index == 0, index == last))
        first += count
    return tuple(stages)


_REPEATED_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_LONGEST_LAYOUT = 100_000
_REPEATED_LETTER = re.compile(r"([A-Za-z|])\*(\d+)")


def expand_layout(text: str) -> list[str]:
    """Spell a layout out, one word of letters a stage.

    Args:
        text: E embedding, t transformer layer, L loss, `|` between stages; `(..)*n` and `x*n`
            repeat, commas and spaces do not count. `Et|(tt|)*2,tL` is four stages.

    Raises:
        PlacementError: The text cannot be read.
    """
    plain = re.sub(r"[,\s]", "", text)
    while _REPEATED_GROUP.search(plain) or _REPEATED_LETTER.search(plain):
        pattern = _REPEATED_GROUP if _REPEATED_GROUP.search(plain) else _REPEATED_LETTER
        length = sum(len(m[1]) * float(m[2]) for m in pattern.finditer(plain))
        if length > _LONGEST_LAYOUT:
            raise PlacementError(
                (_LAYOUT,),
                text,
                f"Spelled out it is longer than {_LONGEST_LAYOUT} letters",
                "Place every layer once",
            )
        plain = pattern.sub(lambda m: m[1] * int(m[2]), plain)
    odd = sorted(set(plain) - set("EtL|"))
    if odd:
        names = "m (multi-token prediction)" if odd == ["m"] else " ".join(odd)
        raise PlacementError(
            (_LAYOUT,),
            text,
            f"{names} is not something to place",
            "Use E, t, L, |, parentheses and *n",
        )
    return plain.split("|")


def _from_layout(c: Any) -> tuple[Stage, ...]:
    words = expand_layout(c.pipeline_model_parallel_layout)
    pp, text = c.pipeline_model_parallel_size, c.pipeline_model_parallel_layout
    joined = "".join(words)
    wrong: tuple[tuple[str, ...], str, str] | None = None
    if len(words) % pp:
        wrong = (
            (_LAYOUT, _PP),
            f"Its {len(words)} stages do not spread evenly over {pp} ranks",
            f"Use a multiple of {pp} stages",
        )
    elif joined.count("t") != c.num_layers:
        wrong = (
            (_LAYOUT, "--num-layers"),
            f"It places {joined.count('t')} of {c.num_layers} layers",
            "Place every layer once",
        )
    elif joined != "E" + "t" * c.num_layers + "L":
        wrong = (
            (_LAYOUT,),
            "A batch starts at E in the first stage and ends at L in the last one, each once",
            "Begin with E and end with L",
        )
    elif not all(words):
        wrong = ((_LAYOUT,), "A stage without content has no parameters", "Remove the empty stage")
    if wrong:
        flags, why, fix = wrong
        raise PlacementError(flags, text, why, fix)
    return _numbered([word.count("t") for word in words])
