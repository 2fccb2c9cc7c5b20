"""Which sizes the FP8 and FP4 products of Transformer Engine take. The one place that knows.

The native backend takes any size: it pads inside the product where hardware wants multiples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.config.fp8_policy import recipes_in_use
from megatron.config.problems import Problem

ALIGNMENT = 16
_WIDER = {"mxfp8": 32}  # a block of scales may not be cut
_PADDED = {"mxfp8": 32, "blockwise": 128}  # whole blocks

Extent = tuple[tuple[str, ...], str, int, int]


def alignment_of(recipe: str) -> int:
    """Multiple that tokens and widths must be, by the recipe's name."""
    return _WIDER.get(recipe, ALIGNMENT)


def expert_alignment_of(recipe: str) -> int:
    """Multiple that the tokens of each expert must be in a grouped product."""
    return 128 if recipe == "nvfp4" else alignment_of(recipe)


def _counts(c: Any, *names: str) -> bool:
    """Whether all these settings are positive numbers."""
    values = [getattr(c, name) for name in names]
    return all(isinstance(value, int) and value > 0 for value in values)


def extents(c: Any) -> Iterator[Extent]:
    """Yield what FP8 products sum over or put out on one rank.

    Args:
        c: A configuration, finished or not. What cannot be known is left out.

    Yields:
        Flags, a description, the size, and its step in units of the first flag (0: none).
    """
    if not _counts(c, "tensor_model_parallel_size", "context_parallel_size"):
        return
    tp = c.tensor_model_parallel_size
    flags: tuple[str, ...]
    if _counts(c, "hidden_size"):
        yield ("--hidden-size",), "the hidden size", c.hidden_size, 1
    if _counts(c, "ffn_hidden_size") and c.ffn_hidden_size % tp == 0:
        flags = ("--ffn-hidden-size", "--tensor-model-parallel-size")
        yield flags, "the MLP width of one rank", c.ffn_hidden_size // tp, tp
    yield from _experts(c)
    if _counts(c, "num_attention_heads", "kv_channels", "num_query_groups"):
        heads = c.num_attention_heads * c.kv_channels
        qkv = heads + 2 * c.num_query_groups * c.kv_channels
        flags = ("--num-attention-heads", "--kv-channels", "--tensor-model-parallel-size")
        if qkv % tp == 0 and heads % tp == 0:
            yield flags, "the QKV width of one rank", qkv // tp, 0
            yield flags, "the attention width of one rank", heads // tp, 0
    if _counts(c, "seq_length", "micro_batch_size"):
        yield from _tokens(c)


def _experts(c: Any) -> Iterator[Extent]:
    """Widths of experts; their tokens are padded where a kernel wants that."""
    widths = (
        ("moe_ffn_hidden_size", "expert_tensor_parallel_size", "an expert's width"),
        ("moe_shared_expert_intermediate_size", "tensor_model_parallel_size", "the shared width"),
    )
    for name, axis, what in widths:
        if c.num_experts is None or not _counts(c, name, axis):
            continue
        width, ranks = getattr(c, name), getattr(c, axis)
        if width % ranks == 0:
            flags = (f"--{name.replace('_', '-')}", f"--{axis.replace('_', '-')}")
            yield flags, f"{what} on one rank", width // ranks, ranks


def _tokens(c: Any) -> Iterator[Extent]:
    cp, tp = c.context_parallel_size, c.tensor_model_parallel_size
    tokens = c.seq_length * c.micro_batch_size
    flags: tuple[str, ...] = ("--seq-length", "--micro-batch-size")
    if cp > 1:
        ranks = cp * tp if c.sequence_parallel else cp
        flags = (*flags, "--context-parallel-size")
        if tokens % ranks == 0:
            yield flags, "the tokens of one rank", tokens // ranks, 0
    elif not c.sequence_parallel:
        yield flags, "the tokens of one microbatch", tokens, 1 if c.micro_batch_size == 1 else 0
    elif tokens % tp == 0:
        flags = (*flags, "--tensor-model-parallel-size")
        step = tp if c.micro_batch_size == 1 else 0
        yield flags, "the tokens of one sequence-parallel rank", tokens // tp, step


def nearest_multiples(size: int, multiple: int) -> list[int]:
    """The positive multiples on either side of a size that is none."""
    below = size // multiple * multiple
    return [n for n in (below, below + multiple) if n > 0]


def misaligned(c: Any) -> Iterator[Problem]:
    """Yield a problem for each size that FP8 or FP4 on Transformer Engine would refuse.

    Args:
        c: A configuration, finished or not.
    """
    multiples = [alignment_of(name) for name in recipes_in_use(c)] or [1]
    kind = "fp4" if c.fp8_format is None else "fp8"
    for flags, what, size, step in extents(c):
        # Every layer sees the tokens; a width concerns some layers, which are checked as they are
        # built.
        multiple = max(multiples) if flags[0] == "--seq-length" else min(multiples)
        if size % multiple == 0:
            continue
        near = nearest_multiples(size, multiple)
        if step:
            fix = f"Set {flags[0]} to {' or '.join(str(n * step) for n in near)}"
        else:
            fix = f"Change them so that it becomes {' or '.join(str(n) for n in near)}"
        yield Problem(
            flags,
            size,
            f"This is {what}, and {kind.upper()} products of Transformer Engine need a multiple of"
            f" {multiple}",
            f"{fix}, use --transformer-impl native, or train without --{kind}-format",
        )


def padding(c: Any) -> str:
    """What the native backend pads on FP8 hardware, in one line; empty if nothing.

    Args:
        c: A finished configuration.
    """
    found, multiple = {}, _PADDED.get(c.fp8_recipe, ALIGNMENT)
    for _, what, size, _ in extents(c):
        if size % multiple:
            padded = nearest_multiples(size, multiple)[-1]
            found[what] = f"{what} {size} as {padded} (+{padded / size - 1:.1%})"
    if not found:
        return ""
    listed = ", ".join(found.values())
    return f"FP8 products are padded with zeros to multiples of {multiple}: {listed}"
