"""Keys of Megatron-Core's checkpoints that mean the same as ours and are spelled otherwise.

* The norm before a layer's experts is ``pre_mlp_layernorm`` where its model was built from
  Transformer Engine's modules, as here, and ``mlp.linear_fc1.layer_norm_*`` where from local ones.
* The masters of an optimizer that is not distributed are ``fp32_param`` instead of ``param``.
* An optimizer of fp32 parameters has no masters: these are the parameters themselves.
* A chain of optimizers (dense parameters and experts) may put ``chained_N.`` before its keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

_CHAINED = re.compile(r"^chained_\d+\.(?=optimizer\.state\.)")
_MASTER, _OWN_MASTER = "optimizer.state.fp32_param.", "optimizer.state.param."
_MOMENT = "optimizer.state.exp_avg."
_FUSED_NORM = re.compile(r"^(?P<layer>.*\blayers\.(?:\d+\.)?)mlp\.linear_fc1\.layer_norm_")
_ROUTER = re.compile(r"^(?P<layer>.*\blayers\.(?:\d+\.)?)mlp\.router\.weight$")


class _Entry(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...


def own_names(keys: Iterable[str]) -> dict[str, str]:
    """Return our name of every stored key -> the stored key."""
    stored = list(keys)
    with_experts = {match["layer"] for key in stored if (match := _ROUTER.match(key))}
    return {_own_name(key, with_experts): key for key in stored}


def weights_as_masters(tensors: Mapping[str, _Entry]) -> dict[str, str]:
    """Return our key of every master that is stored as the weight alone -> the weight's key.

    Args:
        tensors: Stored tensors by our names.
    """
    trained = [k.removeprefix(_MOMENT) for k in tensors if k.startswith(_MOMENT)]
    return {
        _OWN_MASTER + key: key
        for key in trained
        if _OWN_MASTER + key not in tensors
        and key in tensors
        and tensors[key].dtype == torch.float32
    }


def _own_name(key: str, with_experts: set[str]) -> str:
    key = _CHAINED.sub("", key)
    if key.startswith(_MASTER):
        key = _OWN_MASTER + key.removeprefix(_MASTER)
    match = _FUSED_NORM.match(key)
    layer = match["layer"] if match else ""
    # Of optimizer state the layer's name comes behind the kind.
    if match and any(layer == name or layer.endswith("." + name) for name in with_experts):
        return f"{layer}pre_mlp_layernorm.{key[match.end() :]}"
    return key


def local_name(key: str) -> str:
    """Return the name that a model of local modules has for a key of a layer with experts."""
    return key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
