"""The router: which experts each token goes to, with which weights.

Shape legend: s local sequence, b microbatch, T = s * b local tokens, h hidden, E experts, k experts
a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.config.moe import auxiliary_losses
from megatron.core.mesh import Axis
from megatron.core.shards import init_parameter
from megatron.core.tensor_parallel.mappings import all_reduce
from megatron.core.transformer.initialization import init_methods
from megatron.core.transformer.moe import choice, losses
from megatron.core.transformer.moe.capacity import capacity_of, drop_beyond

if TYPE_CHECKING:
    from megatron.core.build import Build

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Routing:
    """What the router decided about this rank's tokens.

    Attributes:
        experts: `[T, k]`; E where a token has lost its place.
        weights: fp32 `[T, k]`.
        loss: What balancing adds to the loss, a scalar, or None.
    """

    experts: Tensor
    weights: Tensor
    loss: Tensor | None = None


class Router(nn.Module):
    """Scores the experts for each token and chooses the best.

    The weight lies in the type of the model's parameters; the product and all that follows is
    computed in `--moe-router-dtype`, and the weight's gradient is summed in fp32.

    Every rank routes tokens of its own, so the weight's gradient is a partial sum over
    tensor-parallel ranks.

    Args:
        build: Configuration, mesh, random streams, path.
        layer_number: 1-based number of the layer in the whole model.
    """

    expert_bias: Tensor | None

    def __init__(self, *, build: Build, layer_number: int) -> None:
        super().__init__()
        config = build.config
        self.config, self.mesh, self.layer = config, build.mesh, layer_number - 1
        self.num_experts, self.topk = config.num_experts, config.moe_router_topk
        self.dtype = _DTYPES[config.moe_router_dtype]
        self.rule = choice.Choice.of(config)
        self.sinkhorn = "sinkhorn" in config.moe_router_load_balancing_type
        self.losses = auxiliary_losses(config)
        self._rng, self._path, self._auxiliary = build.rng, build.path, build.auxiliary
        self.weight = nn.Parameter(
            torch.empty(
                (self.num_experts, config.hidden_size),
                dtype=build.params_dtype,
                device=build.device,
            )
        )
        init_parameter(
            self.weight,
            Axis.single("tp"),
            init_methods(config).hidden,
            config.seed,
            f"{build.path}.weight",
        )
        if build.mesh.tp.size > 1:
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]
        bias: Tensor | None = None
        if config.moe_router_enable_expert_bias:
            bias = torch.zeros(self.num_experts, dtype=torch.float32, device=build.device)
        self.register_buffer("expert_bias", bias)

    def forward(self, hidden: Tensor) -> Routing:
        """Route this rank's tokens, `hidden [s, b, h]`."""
        shape = (hidden.shape[0], hidden.shape[1])
        tokens = self._jittered(hidden).reshape(-1, hidden.shape[-1])
        logits = gate(tokens, self.weight, self.dtype)
        if self.config.moe_router_force_load_balancing:
            generator = self._rng.generator(f"{self._path}.forced", "tp")
            logits = choice.random_logits(logits, generator)
        if self.sinkhorn:
            experts, weights = choice.sinkhorn_choice(
                logits, self.topk, self.mesh.tp_cp, self.training
            )
        else:
            experts, weights = choice.choose(logits, self.rule, self.expert_bias)
        loss = None
        if self.training and torch.is_grad_enabled():
            self._auxiliary.add_load(self.layer, losses.count_tokens(experts, self.num_experts))
            loss = self._loss(logits, experts, shape)
        experts = self._within_capacity(experts, weights, shape)
        return Routing(experts, weights.float(), loss)

    def _jittered(self, hidden: Tensor) -> Tensor:
        eps = self.config.moe_input_jitter_eps
        if not eps or not self.training:
            return hidden
        generator = self._rng.generator(f"{self._path}.jitter", "tp")
        noise = torch.empty_like(hidden, dtype=torch.float32)
        return hidden * noise.uniform_(1.0 - eps, 1.0 + eps, generator=generator).to(hidden.dtype)

    def _loss(self, logits: Tensor, experts: Tensor, shape: tuple[int, int]) -> Tensor | None:
        """Compute and report every balancing loss; return their weighted sum."""
        terms: list[tuple[str, float, Tensor]] = []
        num_tokens = logits.shape[0] * self.mesh.tp_cp.size
        if self.config.moe_z_loss_coeff:
            term = losses.z_loss(logits, num_tokens)
            terms.append(("z_loss", self.config.moe_z_loss_coeff, term))
        if self.losses:
            scores = choice.balanced_scores(logits, self.rule.score_function)
            if self.expert_bias is not None or self.rule.num_groups is not None:
                experts = scores.detach().topk(self.topk, dim=-1).indices
            for kind, coeff in self.losses.items():
                terms.append((kind, coeff, self._balance(kind, scores, experts, shape)))
        for kind, _, term in terms:
            self._auxiliary.add_loss(losses.LOG_NAMES[kind], self.layer, term)
        return sum(coeff * term for _, coeff, term in terms) if terms else None  # type: ignore[return-value]

    def _balance(
        self, kind: str, scores: Tensor, experts: Tensor, shape: tuple[int, int]
    ) -> Tensor:
        mesh = self.mesh
        if kind == "seq_aux_loss":
            return losses.sequence_balance_loss(scores, experts, shape, mesh)
        loads = all_reduce(losses.count_tokens(experts, self.num_experts), mesh.tp_cp)
        num_tokens = scores.shape[0] * mesh.tp_cp.size
        if kind == "aux_loss":
            return losses.balance_loss(scores, loads, num_tokens, self.topk)
        loads = all_reduce(loads, mesh.dp)
        loads = self._auxiliary.running_mean(self.layer, self._rng.position[1], loads)
        whole = num_tokens * mesh.dp.size
        # Replicas are averaged in the end, and each has a part of this term only.
        return losses.balance_loss(scores, loads, whole, self.topk) * mesh.dp.size

    def _within_capacity(self, experts: Tensor, weights: Tensor, shape: tuple[int, int]) -> Tensor:
        capacity = self.capacity(experts.shape[0])
        if capacity is None:
            return experts
        kept = drop_beyond(
            capacity,
            experts.view(*shape, self.topk),
            weights.view(*shape, self.topk),
            self.num_experts,
            self.config.moe_token_drop_policy,
            self.mesh,
        )
        return kept.view(experts.shape)

    def capacity(self, local_tokens: int) -> int | None:
        """Tokens of a microbatch that an expert accepts, None for all."""
        factor = self.config.moe_expert_capacity_factor
        if factor is None:
            return None
        num_tokens = local_tokens * self.mesh.tp_cp.size
        return capacity_of(num_tokens, self.topk, self.num_experts, factor)

    @torch.no_grad()
    def move_bias(self, loads: Tensor) -> None:
        """Move the bias against the load of the last step.

        Args:
            loads: `[E]`, how many tokens of the whole batch chose each expert.

        Source: Wang et al., Auxiliary-Loss-Free Load Balancing, 2024.
        """
        if self.expert_bias is not None:
            direction = torch.sign(loads.mean() - loads).to(self.expert_bias.dtype)
            self.expert_bias.add_(direction, alpha=self.config.moe_router_bias_update_rate)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        kind = "sinkhorn" if self.sinkhorn else self.rule.score_function
        return f"{self.num_experts} experts, top {self.topk}, {kind}"


def gate(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`x @ weight.T` computed in a wider type.

    Args:
        x: `[T, h]`.
        weight: `[E, h]`; with an attribute `main_grad` its gradient is added there, unrounded.
        dtype: Type of the product.

    Returns:
        `[T, E]` in that type.
    """
    return _gate(x, weight, dtype)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.dtype = weight, dtype  # a recomputed forward hands back other objects
        return x.to(dtype) @ weight.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, _ = ctx.saved_tensors
        weight = ctx.weight
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ weight.to(ctx.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = grad.t() @ x.to(ctx.dtype)
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is None:
                dw = dw.to(weight.dtype)
            else:
                main_grad.add_(dw)
                weight.grad_added_to_main_grad = True
                dw = None
        return dx, dw, None


_gate: Callable[..., Tensor] = _Gate.apply
