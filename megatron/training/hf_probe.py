"""Where two implementations of one model part ways: outputs of corresponding parts, in order.

Nothing here uses the tables of ``hf_map``: a mistake in them must show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.training.hf_config import attention_sizes

# Both sides sum the same products in fp32 in different orders; logits of trained models reach some
# tens, and 1e-4 is a few units in the last place of their intermediate sums.
TOLERANCE = 1e-4


class Part(NamedTuple):
    """A module whose output is looked at.

    Attributes:
        module: The module.
        view: Brings its output (or input) into ``[b, s, ...]``.
        of_input: Whether its input is looked at instead.
    """

    module: nn.Module
    view: Callable[[Any], Tensor]
    of_input: bool = False


Parts = dict[str, Part]
Sizes = tuple[int, int, int]


def sizes_of(model: Any) -> Sizes:
    """Heads, query groups and head width of one of our models."""
    return attention_sizes(model.config.to_dict())


def our_layer(layer: Any, number: int, sizes: Sizes, gpt2: bool) -> Parts:
    """Parts of one of our layers, named as HuggingFace names the weights that make them."""
    heads, groups, width = sizes
    prefix, a, m = _names(number, gpt2)
    attention, mlp = layer.self_attention, layer.mlp

    def by_group(out: Any) -> Tensor:
        y = batch_first(out)
        return y.reshape(*y.shape[:2], groups, -1, width)

    per = heads // groups
    queries, keys = slice(0, per), slice(per, per + 1)
    cuts = {"q": queries, "k": keys, "v": slice(per + 1, per + 2)}

    def cut(rows: slice) -> Callable[[Any], Tensor]:
        return lambda out: by_group(out)[..., rows, :].flatten(2)

    parts: Parts = {}
    if gpt2:
        parts[f"{prefix}{a}.c_attn"] = Part(
            attention.linear_qkv, lambda o: torch.cat([cut(c)(o) for c in cuts.values()], -1)
        )
    else:
        for name, rows in cuts.items():
            parts[f"{prefix}{a}.{name}_proj"] = Part(attention.linear_qkv, cut(rows))
    for name in "qk":
        norm = getattr(attention, f"{name}_layernorm", None)
        if norm is not None:
            parts[f"{prefix}{a}.{name}_norm"] = Part(norm, lambda o: batch_first(o).flatten(2))
    parts[_scores(number)] = Part(attention.linear_proj, batch_first, of_input=True)
    parts[f"{prefix}{a}.{'c_proj' if gpt2 else 'o_proj'}"] = Part(
        attention.linear_proj, batch_first
    )
    if hasattr(mlp, "linear_fc1"):
        if gpt2:
            parts[f"{prefix}{m}.c_fc"] = Part(mlp.linear_fc1, batch_first)
        else:
            parts[f"{prefix}{m}.gate_proj"] = Part(
                mlp.linear_fc1, lambda o: batch_first(o).chunk(2, -1)[0]
            )
            parts[f"{prefix}{m}.up_proj"] = Part(
                mlp.linear_fc1, lambda o: batch_first(o).chunk(2, -1)[1]
            )
        down = "c_proj" if gpt2 else "down_proj"
        parts[f"{prefix}{m}.{down}"] = Part(mlp.linear_fc2, batch_first)
    parts[_mlp(number)] = Part(mlp, batch_first)
    return parts


def their_layer(layer: Any, number: int, gpt2: bool) -> Parts:
    """The same parts of a layer of transformers'."""
    prefix, a, m = _names(number, gpt2)
    attention = layer.attn if gpt2 else layer.self_attn
    mlp = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
    parts: Parts = {}
    for name in ("c_attn",) if gpt2 else ("q_proj", "k_proj", "v_proj"):
        parts[f"{prefix}{a}.{name}"] = Part(getattr(attention, name), _theirs)
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            parts[f"{prefix}{a}.{name}"] = Part(getattr(attention, name), _heads_last)
    out = "c_proj" if gpt2 else "o_proj"
    parts[_scores(number)] = Part(getattr(attention, out), _theirs, of_input=True)
    parts[f"{prefix}{a}.{out}"] = Part(getattr(attention, out), _theirs)
    for name in ("c_fc", "c_proj") if gpt2 else ("gate_proj", "up_proj", "down_proj"):
        module = getattr(mlp, name, None)
        if module is not None:
            parts[f"{prefix}{m}.{name}"] = Part(module, _theirs)
    parts[_mlp(number)] = Part(mlp, _theirs)
    return parts


def _names(number: int, gpt2: bool) -> tuple[str, str, str]:
    if gpt2:
        return f"transformer.h.{number}.", "attn", "mlp"
    return f"model.layers.{number}.", "self_attn", "mlp"


def _scores(number: int) -> str:
    return (
        f"the scores of attention in layer {number}, whose queries, keys and values agree: look at "
        "rope_theta, rope_scaling and the width of a head"
    )


def _mlp(number: int) -> str:
    return f"the MLP of layer {number}"


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, (tuple, list)) else out


def batch_first(out: Any) -> Tensor:
    """``[s, b, ...]``, with a bias that the module hands over instead of adding it."""
    y: Tensor = _first(out)
    if isinstance(out, tuple) and len(out) > 1 and isinstance(out[1], Tensor):
        y = y + out[1]
    return y.transpose(0, 1)


def _theirs(out: Any) -> Tensor:
    y: Tensor = _first(out)
    return y


def _heads_last(out: Any) -> Tensor:
    """``[b, s, n, d]`` or ``[b, n, s, d]`` flattened; transformers norms before it transposes."""
    return _theirs(out).flatten(2)


@contextmanager
def recorded(parts: Mapping[str, Part]) -> Iterator[dict[str, Tensor]]:
    """Keep the outputs of parts, in their order."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, part: Part) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, out: Any) -> None:
            seen = inputs[0] if part.of_input else out
            outputs[name] = part.view(seen).detach().float().clone()

        return hook

    handles = [p.module.register_forward_hook(keep(name, p)) for name, p in parts.items()]
    ordered: dict[str, Tensor] = {}
    try:
        yield ordered
    finally:
        for handle in handles:
            handle.remove()
        ordered.update({name: outputs[name] for name in parts if name in outputs})


def first_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str | None:
    """Name the first part whose outputs differ, with by how much; None if all agree."""
    for name, own in left.items():
        other = right.get(name)
        if other is None:
            continue
        if own.shape != other.shape:
            return f"{name} ({tuple(own.shape)} and {tuple(other.shape)})"
        difference = float((own - other).abs().max())
        # A NaN compares false with everything: ask for what must hold.
        if not difference <= TOLERANCE * max(1.0, float(other.abs().max())):
            return f"{name} (by up to {difference:.2e})"
    return None


def wrong_expert(ours: Any, theirs: Any) -> str:
    """Name what differs between two MLPs with experts, whose inputs agree.

    Args:
        ours: A layer of ours.
        theirs: The same layer of transformers', whose experts' weights are stacked.
    """
    mlp = theirs.mlp if hasattr(theirs, "mlp") else theirs.block_sparse_moe
    experts = getattr(mlp, "experts", None)
    if experts is None or not hasattr(ours.mlp, "router"):
        return ""
    own = dict(ours.mlp.named_parameters())
    gate = next((p for n, p in mlp.named_parameters() if n in ("gate.weight",)), None)
    if gate is not None and not torch.equal(own["router.weight"], gate):
        return ": the router (gate.weight)"
    for here, there in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        for e, weight in enumerate(getattr(experts, there, ())):
            if not torch.equal(own[f"experts.{here}.weight{e}"], weight):
                return f": expert {e} ({there})"
    return ""
