"""Keys of Megatron-Core's checkpoints that mean the same as ours and are spelled otherwise.

* The norm before a layer's experts is ``pre_mlp_layernorm`` where its model was built from
  Transformer Engine's modules, as here, and ``mlp.linear_fc1.layer_norm_*`` where from local ones.
* The masters of an optimizer that is not distributed are ``fp32_param`` instead of ``param``.
* A chain of optimizers (dense parameters and experts) may put ``chained_N.`` before its keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_CHAINED = re.compile(r"^chained_\d+\.(?=optimizer\.state\.)")
_MASTER = "optimizer.state.fp32_param."
_FUSED_NORM = re.compile(r"^(?P<layer>.*\blayers\.(?:\d+\.)?)mlp\.linear_fc1\.layer_norm_")
_ROUTER = re.compile(r"^(?P<layer>.*\blayers\.(?:\d+\.)?)mlp\.router\.weight$")


def own_names(keys: Iterable[str]) -> dict[str, str]:
    """Return our name of every stored key -> the stored key."""
    stored = list(keys)
    with_experts = {match["layer"] for key in stored if (match := _ROUTER.match(key))}
    return {_own_name(key, with_experts): key for key in stored}


def _own_name(key: str, with_experts: set[str]) -> str:
    key = _CHAINED.sub("", key)
    if key.startswith(_MASTER):
        key = "optimizer.state.param." + key.removeprefix(_MASTER)
    match = _FUSED_NORM.match(key)
    layer = match["layer"] if match else ""
    # Of optimizer state the layer's name comes behind the kind.
    if match and any(layer == name or layer.endswith("." + name) for name in with_experts):
        return f"{layer}pre_mlp_layernorm.{key[match.end() :]}"
    return key


def local_name(key: str) -> str:
    """Return the name that a model of local modules has for a key of a layer with experts."""
    return key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
