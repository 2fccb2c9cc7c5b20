"""FP8 layers as plain modules, for people with their own training loop. See `autocast.py`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.errors import complaint
from megatron.core.fp8.amax import fit_history
from megatron.core.fp8.autocast import SESSION, refuse_foreign_recompute
from megatron.core.fp8.linear import linear
from megatron.core.fp8.precision import LinearPrecision
from megatron.core.fp8.state import Fp8State

_NUMBERS = itertools.count()
_HIGH_PRECISION = Fp8State.disabled().for_linear("high precision")


class Linear(nn.Module):
    """`y = x W^T + b`, in FP8 inside `autocast`.

    Args:
        in_features: Input width.
        out_features: Output width.
        bias: Whether to add a bias.
        params_dtype: Type of parameters and output; default torch's default type.
        device: Where the parameters live.
        init_method: Fills the weight in place; default that of `torch.nn.Linear`.
        name: Label in messages and tables.

    Attributes:
        fp8_meta: Scaling state under Transformer Engine's keys. After the first FP8 forward with
            delayed scaling: `scaling_fwd.amax_history` `[L, 3]`, `scaling_bwd.amax_history`
            `[L, 2]`, and `scale`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.init_method, self.name = init_method, name
        dtype = params_dtype or torch.get_default_dtype()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device=device)
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device))
        self._precision: LinearPrecision | None = None
        self._restored: dict[str, Any] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters."""
        bound = self.in_features**-0.5
        with torch.no_grad():
            if self.init_method is None:
                nn.init.uniform_(self.weight, -bound, bound)
            else:
                self.init_method(self.weight)
            if self.bias is not None:
                nn.init.zeros_(self.bias)

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """Scaling state, see the class."""
        return (self._precision or _HIGH_PRECISION).fp8_meta

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: `[..., in_features]`.
            is_first_microbatch: Hint on weight caching. False allows a weight that was quantized
                with earlier scales to be used again; True quantizes it anew. A changed weight is
                always quantized again.

        Returns:
            `[..., out_features]`.
        """
        return self._apply_linear(x, self._enter(), is_first_microbatch)

    def _enter(self) -> LinearPrecision:
        """The precision of a forward that starts now."""
        frame = SESSION.frame
        if frame is None or not frame.enabled:
            if self._precision is not None:
                refuse_foreign_recompute()
            return _HIGH_PRECISION
        state = SESSION.state(frame, self.weight.device)
        if self._precision is None or self._precision.state is not state:
            self._join(state)
        return self._precision or _HIGH_PRECISION

    def _apply_linear(
        self, x: torch.Tensor, precision: LinearPrecision, hint: bool | None
    ) -> torch.Tensor:
        after_backward = None
        differentiable = torch.is_grad_enabled() and (
            x.requires_grad or any(p.requires_grad for p in self.parameters(recurse=False))
        )
        if precision.active and differentiable and SESSION.claim_first():
            after_backward = SESSION.update_backward
        return linear(
            x,
            self.weight,
            self.bias,
            precision,
            is_first_microbatch=hint,
            after_backward=after_backward,
        )

    def _join(self, state: Fp8State) -> None:
        """Take part in a state; histories move along, adjusted to its length."""
        carried = self._scaling() or self._restored
        if self._precision is not None:
            self._precision.state.forget(self._precision.path)
        path = f"{self.name or type(self).__name__}#{next(_NUMBERS)}"
        self._precision = state.for_linear(path)
        weakref.finalize(self, state.forget, path)
        self._restored = None
        if carried and self._precision.slots is not None:
            self._load_scaling(carried)

    def _scaling(self) -> dict[str, Any]:
        """Scales and histories as plain tensors; empty without any."""
        if self._precision is None or self._precision.slots is None:
            return {}
        book, path = self._precision.slots.book, self._precision.path
        return book.state_dict(paths=[path])[path]

    def _load_scaling(self, saved: dict[str, Any]) -> None:
        slots = self._precision.slots if self._precision is not None else None
        if slots is None:
            self._restored = saved
            return
        length = slots.book.history.shape[0]
        for which, view in (("fwd", slots.forward), ("bwd", slots.backward)):
            history = saved[f"amax_history_{which}"].to(view.amax_history.device)
            view.amax_history.copy_(fit_history(history, length))
            view.scale.copy_(saved[f"scale_{which}"])

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module starts with copies of its scales, in columns of its own.
        return {**self.__dict__, "_restored": self.get_extra_state(), "_precision": None}

    def get_extra_state(self) -> dict[str, Any]:
        """Scales and histories for `state_dict`; tensors only."""
        return self._scaling() or self._restored or {}

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Take over scales and histories; an empty state changes nothing."""
        if state:
            self._load_scaling(state)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A checkpoint made without FP8 has no extra state, which is not an error.
        state_dict.setdefault(f"{prefix}_extra_state", {})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Sizes, as `torch.nn.Linear` shows them."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class LayerNormLinear(Linear):
    """A normalisation and a linear layer, with the cast to FP8 fused between them.

    With delayed scaling the cast sees the fp32 output of the normalisation; with current scaling
    it sees that output rounded to the parameters' type.

    Args:
        in_features: Input width, normalised.
        out_features: Output width.
        bias: Whether the linear layer adds a bias.
        eps: Added to the variance.
        normalization: `LayerNorm` or `RMSNorm`.
        zero_centered_gamma: Whether the norm's weight is stored minus one.
        kwargs: As for `Linear`.

    Raises:
        ValueError: For an unknown normalisation.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **kwargs: Any,
    ) -> None:
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(
                complaint(
                    "LayerNormLinear(normalization=)",
                    normalization,
                    "Unknown normalisation",
                    "Use LayerNorm or RMSNorm",
                )
            )
        super().__init__(in_features, out_features, bias, **kwargs)
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        initial = torch.zeros if zero_centered_gamma else torch.ones
        dtype, device = self.weight.dtype, self.weight.device
        self.layer_norm_weight = nn.Parameter(initial(in_features, dtype=dtype, device=device))
        self.layer_norm_bias: nn.Parameter | None = None
        if normalization == "LayerNorm":
            beta = torch.zeros(in_features, dtype=dtype, device=device)
            self.layer_norm_bias = nn.Parameter(beta)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """Normalise and apply the linear layer; arguments as for `Linear`."""
        precision = self._enter()
        normed = self._normalise(x.float())
        if not precision.wants_fp32_norm:
            normed = normed.to(self.weight.dtype)
        return self._apply_linear(normed, precision, is_first_microbatch)

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        gamma = self.layer_norm_weight.float()
        if self.zero_centered_gamma:
            gamma = gamma + 1.0
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, (self.in_features,), gamma, self.eps)
        beta = None if self.layer_norm_bias is None else self.layer_norm_bias.float()
        return F.layer_norm(x, (self.in_features,), gamma, beta, self.eps)
