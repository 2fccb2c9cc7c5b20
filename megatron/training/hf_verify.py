"""Proof of a conversion: both models compute the same logits, in fp32, from the written files.

When they do not, the report names the first stored tensor that came out different, or the first
part of the first layer whose output differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
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
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError, complaint
from megatron.core.mesh import ParallelState
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.checkpoint_config import (
    ARCHITECTURE,
    read_common,
    saved_settings,
    stacking_of,
)
from megatron.training.hf_convert import (
    DTYPES,
    HfSource,
    MegatronSource,
    Source,
    config_of,
)
from megatron.training.hf_rows import every_tensor

# Both sides sum the same products in fp32 in different orders; logits of trained models reach some
# tens, and 1e-4 is a few units in the last place of their intermediate sums.
TOLERANCE = 1e-4
_PROMPTS, _LENGTH, _SEED = 2, 32, 20240501


@dataclass(frozen=True)
class Report:
    """Outcome of a comparison.

    Attributes:
        max_difference: Largest absolute difference of logits.
        max_logit: Largest absolute logit.
        same_greedy: Share of positions whose most likely token agrees.
        tokens: Number of positions compared.
    """

    max_difference: float
    max_logit: float
    same_greedy: float
    tokens: int

    def line(self) -> str:
        """Say it in one line."""
        return (
            f"logits of {self.tokens} positions in fp32: max |difference| {self.max_difference:.2e}"
            f" (max |logit| {self.max_logit:.1f}), same most likely token at "
            f"{100 * self.same_greedy:.1f} %"
        )


def prompts(vocab_size: int, max_length: int) -> Tensor:
    """Return the fixed token ids ``[b, s]`` that both models read."""
    generator = torch.Generator().manual_seed(_SEED)
    length = min(_LENGTH, max_length)
    return torch.randint(0, vocab_size, (_PROMPTS, length), generator=generator)


def verify(megatron: Path, huggingface: Path, dtype: str, vocab_size: int | None = None) -> Report:
    """Compare a checkpoint with a HuggingFace directory.

    Args:
        megatron: One checkpoint's directory; it need not be committed yet.
        huggingface: The other one.
        dtype: ``fp32``, ``bf16`` or ``fp16``: the type that the conversion wrote. Weights are
            rounded to it on both sides and everything is computed in fp32.
        vocab_size: Vocabulary without padding; default from the checkpoint.

    Raises:
        CheckpointError: They differ; names the first tensor or the first part of the model.
    """
    stored = MegatronSource(Reader(megatron), vocab_size)
    _compare_tensors(stored, HfSource(huggingface), DTYPES[dtype])
    ours = load_ours(megatron, dtype, vocab_size)
    theirs = load_theirs(huggingface, dtype)
    return compare_models(ours, theirs)


def _compare_tensors(stored: Source, other: HfSource, dtype: torch.dtype) -> None:
    for row, place in every_tensor(other.rows(), other.fields["num_layers"]):
        own = row.dtype or dtype
        a, b = stored.read(row, place).to(own), other.read(row, place).to(own)
        if a.shape != b.shape or not torch.equal(a, b):
            names = ", ".join(place.of(n) for n in row.names)
            at = "" if place.layer is None else f", layer {place.layer}"
            at += "" if place.expert is None else f", expert {place.expert}"
            raise _wrong(
                f"other values of {row.key}{at}", f"The stored values differ from those of {names}"
            )


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
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"transformers cannot load it: {error}"
        fix = "Look at what it says, or leave the check out with --no-verify"
        raise CheckpointError(complaint("--verify", directory, problem, fix)) from error
    _round_(model, DTYPES[dtype])
    return model


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
def compare_models(ours: GPTModel, theirs: nn.Module, tokens: Tensor | None = None) -> Report:
    """Compare logits, and on a difference find the first part of the model that makes it.

    Args:
        ours: This project's model, fp32.
        theirs: transformers' model, fp32.
        tokens: ``[b, s]`` token ids; default the fixed prompts.

    Raises:
        CheckpointError: The logits differ by more than the tolerance.
    """
    vocabulary = ours.vocab_size
    if tokens is None:
        tokens = prompts(vocabulary, ours.config.max_position_embeddings)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with _recorded(_our_parts(ours)) as left, _recorded(_their_parts(theirs)) as right:
        own = ours(tokens, positions)[..., :vocabulary].float()
        other = theirs(input_ids=tokens).logits.float()
    difference = float((own - other).abs().max())
    report = Report(
        difference,
        float(other.abs().max()),
        float((own.argmax(-1) == other.argmax(-1)).float().mean()),
        tokens.numel(),
    )
    # A NaN compares false with everything: ask for what must hold.
    if not difference <= TOLERANCE * max(1.0, report.max_logit / 10):
        raise _wrong(report.line(), _first_difference(left, right))
    return report


def _wrong(got: str, why: str) -> CheckpointError:
    fix = "The conversion is wrong: do not use its result"
    return CheckpointError(complaint("--verify", got, why, fix))


def _first_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str:
    for part, own in left.items():
        other = right.get(part)
        if other is None:
            continue
        allowed = TOLERANCE * max(1.0, float(other.abs().max()))
        difference = float((own - other).abs().max())
        if not difference <= allowed:
            return f"The first part that differs is {part} (by up to {difference:.2e})"
    return "All layers agree; the output layer differs"


def _our_parts(model: GPTModel) -> dict[str, tuple[nn.Module, Callable[[Any], Tensor]]]:
    def batch_first(out: Any) -> Tensor:
        return _tensor(out).transpose(0, 1)

    embedding: Any = model.embedding
    parts: dict[str, tuple[nn.Module, Callable[[Any], Tensor]]] = {
        "the embedding": (embedding, batch_first)
    }
    decoder: Any = model.decoder
    for i, layer in enumerate(decoder.layers):
        parts[f"the attention of layer {i}"] = (layer.self_attention, batch_first)
        parts[f"the MLP of layer {i}"] = (layer.mlp, batch_first)
    parts["the final norm"] = (decoder.final_layernorm, batch_first)
    return parts


def _their_parts(model: Any) -> dict[str, tuple[nn.Module, Callable[[Any], Tensor]]]:
    gpt2 = hasattr(model, "transformer")
    base = model.transformer if gpt2 else model.model
    parts: dict[str, tuple[nn.Module, Callable[[Any], Tensor]]] = {
        "the embedding": (base.drop if gpt2 else base.embed_tokens, _tensor)
    }
    for i, layer in enumerate(base.h if gpt2 else base.layers):
        parts[f"the attention of layer {i}"] = (layer.attn if gpt2 else layer.self_attn, _tensor)
        mlp = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
        parts[f"the MLP of layer {i}"] = (mlp, _tensor)
    parts["the final norm"] = (base.ln_f if gpt2 else base.norm, _tensor)
    return parts


def _tensor(out: Any) -> Tensor:
    first: Tensor = out[0] if isinstance(out, (tuple, list)) else out
    return first


@contextmanager
def _recorded(
    parts: Mapping[str, tuple[nn.Module, Callable[[Any], Tensor]]],
) -> Iterator[dict[str, Tensor]]:
    """Keep the outputs of modules, in the order of ``parts``."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, view: Callable[[Any], Tensor]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, out: Any) -> None:
            outputs[name] = view(out).detach().float().clone()

        return hook

    handles = [m.register_forward_hook(keep(name, view)) for name, (m, view) in parts.items()]
    ordered: dict[str, Tensor] = {}
    try:
        yield ordered
    finally:
        for handle in handles:
            handle.remove()
        ordered.update({name: outputs[name] for name in parts if name in outputs})
