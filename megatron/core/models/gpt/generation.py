"""Continue token sequences with a model.

Shape legend: b sequences, s tokens, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.errors import DataError, complaint
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import all_gather
from megatron.core.transformer.kv_cache import KVCache

_COLDEST = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Choose among this many most probable tokens; 0 means all.
        top_p: Choose among the most probable tokens that together have this probability.
        seed: Of the choice.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        for flag, value, good, why in (
            ("--temperature", self.temperature, self.temperature >= 0, "It cannot be negative"),
            ("--top-k", self.top_k, self.top_k >= 0, "It counts tokens"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "It is a probability"),
            ("--seed", self.seed, 0 <= self.seed < 2**63, "A generator takes 63 bits"),
        ):
            if not good:
                raise DataError(complaint(flag, value, why, "Leave it out for the default"))


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The next token of every sequence.

    Args:
        logits: `[b, v]` of real tokens; padding of the vocabulary must be cut off.
        sampling: How to choose.
        generator: Random numbers, on the CPU, so that every device chooses alike.

    Returns:
        `[b]` token ids, on the CPU.

    Raises:
        DataError: A logit is not finite.
    """
    logits = logits.float().cpu()
    if not bool(logits.isfinite().all()):
        raise DataError(
            complaint(
                "logits",
                "values that are no numbers",
                "The model does not say which token comes next",
                "Look at the checkpoint: its weights may not be finite",
            )
        )
    if sampling.temperature == 0:
        return logits.argmax(-1)
    # Neither a quotient nor a temperature leaves the range of fp32.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, _COLDEST)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        ordered = ordered.masked_fill(before >= sampling.top_p, float("-inf"))
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    eod: int | None = None,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """Continue every prompt.

    All sequences start at position 0 and advance together; one whose prompt is longer reads its
    prompt while others already choose. So a batch gives what its sequences give alone.

    Args:
        model: In evaluation mode; all tensor-parallel ranks call this together.
        prompts: Token ids, at least one per prompt.
        max_new_tokens: Longest continuation.
        sampling: How tokens are chosen.
        eod: Token that ends a sequence; it is not part of the result.
        vocab_size: Choose among this many first ids, those that the tokenizer has; None for all
            of the model's.

    Returns:
        The continuations, without the prompts.

    Raises:
        DataError: A prompt is empty, or the model has too few positions.
    """
    _check(model, prompts, max_new_tokens)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    lengths = torch.tensor([len(p) for p in prompts])
    total = int(lengths.max()) + max_new_tokens
    rows = torch.zeros(len(prompts), total, dtype=torch.long)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    ends = lengths + max_new_tokens
    finished = torch.zeros(len(prompts), dtype=torch.bool)
    cache = KVCache(total)
    known = min(model.vocab_size, vocab_size or model.vocab_size)
    here = int(lengths.min())
    while here < total and not bool(finished.all()):
        new = rows[:, cache.length : here].to(device)
        logits = model(new, cache.positions(new), cache=cache)[:, -1:]
        logits = all_gather(logits, model.axis, dim=-1)[:, 0, :known]
        chosen = choose(logits, sampling, generator)
        choosing = (lengths <= here) & ~finished
        rows[:, here] = torch.where(choosing, chosen, rows[:, here])
        if eod is not None:
            ended = choosing & (chosen == eod)
            ends = torch.where(ended, here, ends)
            finished |= ended
        here += 1
        finished |= here >= ends
    return [
        row[length:end].tolist()
        for row, length, end in zip(rows, lengths.tolist(), ends.tolist(), strict=True)
    ]


def _check(model: GPTModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if not prompts or not all(prompts):
        raise DataError(
            complaint("--prompt", "no tokens", "There is nothing to continue", "Give some text")
        )
    if max_new_tokens < 1:
        raise DataError(complaint("--max-new-tokens", max_new_tokens, "It is a count", "Use >= 1"))
    longest, positions = max(map(len, prompts)), model.config.max_position_embeddings
    if longest + max_new_tokens > positions:
        left = positions - longest
        raise DataError(
            complaint(
                "--max-new-tokens",
                max_new_tokens,
                f"The prompt has {longest} tokens and the model has {positions} positions "
                "(--max-position-embeddings)",
                f"Use at most {left}" if left > 0 else "Shorten the prompt",
            )
        )
