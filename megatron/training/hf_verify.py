"""Proof of a conversion: both models compute the same logits, in fp32, from the written files.

When they do not, the report names the first stored tensor that came out different, or the first
part of the first layer whose output differs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.dist_checkpointing import schema
from megatron.core.dist_checkpointing.mp_reader import open_reader
from megatron.core.errors import CheckpointError, complaint
from megatron.core.mesh import ParallelState
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import hf_probe
from megatron.training.checkpoint_config import (
    ARCHITECTURE,
    read_common,
    saved_settings,
    stacking_of,
)
from megatron.training.hf_convert import DTYPES, config_of, planned_tensors
from megatron.training.hf_fp8 import Exporter
from megatron.training.hf_rows import OUTSIDE, every_tensor
from megatron.training.hf_sources import HfSource, MegatronSource, Source
from megatron.training.hf_stream import Streamed

_PROMPTS, _LENGTH, _SEED = 2, 32, 20240501


@dataclass(frozen=True)
class Report:
    """Outcome of a comparison.

    Attributes:
        max_difference: Largest absolute difference of logits.
        max_logit: Largest absolute logit.
        same_greedy: Share of positions whose most likely token agrees.
        tokens: Number of positions compared.
        streamed: Whether every layer was compared by itself, both sides with the same inputs.
    """

    max_difference: float
    max_logit: float
    same_greedy: float
    tokens: int
    streamed: bool = False

    @classmethod
    def of(cls, own: Tensor, other: Tensor, streamed: bool = False) -> Report:
        """Compare logits ``[b, s, v]``."""
        return cls(
            float((own - other).abs().max()),
            float(other.abs().max()),
            float((own.argmax(-1) == other.argmax(-1)).float().mean()),
            own.shape[0] * own.shape[1],
            streamed,
        )

    @property
    def good(self) -> bool:
        """Whether they agree within the tolerance; a NaN does not."""
        return self.max_difference <= hf_probe.TOLERANCE * max(1.0, self.max_logit / 10)

    def line(self) -> str:
        """Say it in one line."""
        how = ", layer by layer from the same inputs" if self.streamed else ""
        return (
            f"logits of {self.tokens} positions in fp32{how}: "
            f"max |difference| {self.max_difference:.2e} (max |logit| {self.max_logit:.1f}), "
            f"same most likely token at {100 * self.same_greedy:.1f} %"
        )


def prompts(vocab_size: int, max_length: int) -> Tensor:
    """Return the fixed token ids ``[b, s]`` that both models read."""
    generator = torch.Generator().manual_seed(_SEED)
    length = min(_LENGTH, max_length)
    return torch.randint(0, vocab_size, (_PROMPTS, length), generator=generator)


def verify(
    megatron: Path,
    huggingface: Path,
    dtype: str,
    vocab_size: int | None = None,
    *,
    fp8: Exporter | None = None,
    streamed: bool = False,
) -> Report:
    """Compare a checkpoint with a HuggingFace directory.

    Args:
        megatron: One checkpoint's directory; it need not be committed yet.
        huggingface: The other one.
        dtype: ``fp32``, ``bf16`` or ``fp16``: the type that the conversion wrote. Weights are
            rounded to it on both sides and everything is computed in fp32.
        vocab_size: Vocabulary without padding; default from the checkpoint.
        fp8: What quantized the directory, if it was quantized: codes and scales are made again
            and compared, and both models compute with the dequantized weights.
        streamed: Whether the models are run layer by layer, in the memory of one layer.

    Raises:
        CheckpointError: They differ; names the first tensor or the first part of the model.
    """
    stored, other = MegatronSource(open_reader(megatron), vocab_size), HfSource(huggingface)
    if fp8 is not None:
        _compare_codes(stored, other, DTYPES[dtype], fp8)
    else:
        _compare_tensors(stored, other, DTYPES[dtype])
    if fp8 is None and not streamed and not len(other.weights):
        return compare_models(
            load_ours(megatron, dtype, vocab_size), load_theirs(huggingface, dtype)
        )
    # In an export both sides have its dequantized weights, which no other type holds exactly.
    source: Source = stored if fp8 is None else other
    exact = torch.float32 if fp8 is not None else DTYPES[dtype]
    library, limit = import_transformers(), other.fields["max_position_embeddings"]
    with _their_refusals(huggingface):
        models = Streamed(source, other, exact, library)
        own, theirs, where = models.logits(prompts(other.fields["vocab_size"], limit))
    report = Report.of(own, theirs, streamed=True)
    if where is not None:
        raise _wrong("layers that compute other values", _explained(where))
    if not report.good:
        raise _wrong(report.line(), _explained(None))
    return report


def _compare_codes(stored: Source, other: HfSource, dtype: torch.dtype, fp8: Exporter) -> None:
    """Quantize again and compare all that was written, bit by bit."""
    for planned in planned_tensors(stored, other.model_type, fp8):
        made = planned.make().to(planned.dtype or dtype)
        got = other.weights.stored(other.name_of(planned.name, OUTSIDE))
        same = made.dtype == got.dtype and made.shape == got.shape
        if not same or not torch.equal(_bits(made), _bits(got)):
            raise _wrong(f"other values of {planned.name}", "It is not what was to be written")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _compare_tensors(stored: Source, other: HfSource, dtype: torch.dtype) -> None:
    for row, place in every_tensor(other.rows(), other.fields["num_layers"]):
        own = row.dtype or dtype
        a, b = stored.read(row, place).to(own), other.read(row, place).to(own)
        if a.shape != b.shape or not torch.equal(a, b):
            names = ", ".join(place.of(n) for n in row.names)
            at = "" if place.layer is None else f", layer {place.layer}"
            at += "" if place.expert is None else f", expert {place.expert}"
            if _same_but_nan(a, b):
                raise _not_numbers(f"NaN in {row.key}{at} ({names})")
            raise _wrong(
                f"other values of {row.key}{at}", f"The stored values differ from those of {names}"
            )


def _same_but_nan(a: Tensor, b: Tensor) -> bool:
    """Whether NaN, which equals nothing, stands in the same places and the rest is equal."""
    holes = a.isnan()
    return a.shape == b.shape and torch.equal(a[~holes], b[~holes]) and bool(b[holes].isnan().all())


def _not_numbers(got: str) -> CheckpointError:
    why = "Both sides hold it in the same places, so it was there before, and no logits compare"
    fix = "Look for a sound copy of the model, or convert with --no-verify"
    return CheckpointError(complaint("--verify", got, why, fix))


def load_ours(directory: Path, dtype: str = "fp32", vocab_size: int | None = None) -> GPTModel:
    """Build this project's model on the CPU in fp32 with a checkpoint's weights.

    Args:
        directory: One checkpoint's directory.
        dtype: Round the weights to this type first.
        vocab_size: Vocabulary without padding; default from the checkpoint.
    """
    reader = open_reader(directory)
    fields = saved_settings(read_common(reader))
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    cfg = config_of({n: v for n, v in fields.items() if n in ARCHITECTURE}, "fp32")
    build = Build.root(cfg, ParallelState.single(), NativeBackend(), torch.device("cpu"))
    model = GPTModel(build).eval()
    stacking = stacking_of(cfg).as_in(reader.tensors)
    reader.load(schema.model_state(model, ParallelState.single(), stacking))
    _round_(model, DTYPES[dtype])
    return model


def load_theirs(directory: Path, dtype: str = "fp32") -> nn.Module:
    """Build transformers' model in fp32 from a directory.

    Raises:
        CheckpointError: transformers is not installed, or refuses the directory.
    """
    transformers = import_transformers()
    with _their_refusals(directory):
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
    _round_(model, DTYPES[dtype])
    return model


@contextmanager
def _their_refusals(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"transformers cannot load it: {error}"
        fix = "Look at what it says, or leave the check out with --no-verify"
        raise CheckpointError(complaint("--verify", directory, problem, fix)) from error


def import_transformers() -> Any:
    """Import the optional package, quietly.

    Raises:
        CheckpointError: It is not installed.
    """
    try:
        import transformers  # noqa: PLC0415  (optional package)
    except ImportError as error:
        raise CheckpointError(
            complaint(
                "--verify",
                "no transformers",
                "The logits are compared with that library's",
                "Install transformers, or pass --no-verify",
            )
        ) from error
    library: Any = transformers
    logging.getLogger("transformers").setLevel(logging.ERROR)
    library.utils.logging.disable_progress_bar()
    return library


@torch.no_grad()
def _round_(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


@torch.no_grad()
def compare_models(ours: GPTModel, theirs: nn.Module) -> Report:
    """Compare logits, and on a difference find the first part of the model that makes it.

    Args:
        ours: This project's model, fp32.
        theirs: transformers' model, fp32.

    Raises:
        CheckpointError: The logits differ by more than the tolerance.
    """
    vocabulary = ours.vocab_size
    tokens = prompts(vocabulary, ours.config.max_position_embeddings)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    left_parts, right_parts = _parts(ours, theirs)
    with hf_probe.recorded(left_parts) as left, hf_probe.recorded(right_parts) as right:
        own = ours(tokens, positions)[..., :vocabulary].float()
        other = theirs(input_ids=tokens).logits.float()
    report = Report.of(own, other)
    if not report.good:
        where = hf_probe.first_difference(left, right)
        raise _wrong(report.line(), _explained(where, ours, theirs))
    return report


def _explained(where: str | None, ours: Any = None, theirs: Any = None) -> str:
    if where is None:
        return "All layers agree; the output layer differs"
    number = re.match(r"the MLP of layer (\d+)", where)
    if number and ours is not None:
        i = int(number[1])
        where += hf_probe.wrong_expert(ours.decoder.layers[i], _their_layers(theirs)[i])
    return f"The first part that differs is {where}"


def _wrong(got: str, why: str) -> CheckpointError:
    fix = "The conversion is wrong: do not use its result"
    return CheckpointError(complaint("--verify", got, why, fix))


def _their_layers(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def _parts(ours: Any, theirs: Any) -> tuple[hf_probe.Parts, hf_probe.Parts]:
    gpt2 = hasattr(theirs, "transformer")
    base = theirs.transformer if gpt2 else theirs.model
    sizes = hf_probe.sizes_of(ours)
    left = {"the embedding": hf_probe.Part(ours.embedding, hf_probe.batch_first)}
    right = {"the embedding": hf_probe.Part(base.drop if gpt2 else base.embed_tokens, _same)}
    for i, (own, other) in enumerate(zip(ours.decoder.layers, _their_layers(theirs), strict=True)):
        left |= hf_probe.our_layer(own, i, sizes, gpt2)
        right |= hf_probe.their_layer(other, i, gpt2)
    left["the final norm"] = hf_probe.Part(ours.decoder.final_layernorm, hf_probe.batch_first)
    right["the final norm"] = hf_probe.Part(base.ln_f if gpt2 else base.norm, _same)
    return left, right


def _same(out: Tensor) -> Tensor:
    return out
