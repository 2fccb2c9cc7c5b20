"""A stand-in for Transformer Engine that says it is one.

It is no FP8 implementation: linear layers multiply in the tensors' own type. It does three things:
every call is bound against the signature that the chosen release really has, every call is
recorded, and the book-keeping that the backend relies on (autocast nesting, when scales move, the
cache of quantized weights, accumulation into `main_grad`) follows what the library documents.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron.core.backends.te_calls import Library, parse_version
from tests.contract.te_sources import load_table, signature


class UserBufferQuantizationMode(enum.Enum):
    NONE = "none"
    FP8 = "fp8"


class Format(enum.Enum):
    HYBRID = (448.0, 57344.0)
    E4M3 = (448.0, 448.0)


@dataclass
class Call:
    """One recorded call: the release's name for what was called, and the bound arguments."""

    symbol: str
    arguments: dict[str, Any]


@dataclass
class State:
    """What Transformer Engine keeps per process: autocast nesting and the registered layers."""

    depth: int = 0
    enabled: bool = False
    recipe: Any = None
    group: Any = None
    is_first_module: bool = False
    layers: dict[int, Any] = field(default_factory=dict)
    updates: list[str] = field(default_factory=list)
    userbuffers: bool = False


class FakeTransformerEngine:
    """One release; `library` is what the backend works with."""

    def __init__(self, version: str) -> None:
        self.table = load_table(version)
        self.version = parse_version(version)
        self.calls: list[Call] = []
        self.lacking: dict[str, tuple[bool, str]] = {}  # what a device cannot do, and why
        self.state = State()
        self.prefix = "pytorch.quantization" if self.version >= (2, 9) else "pytorch.fp8"
        self.library = Library(self.version, self._pytorch(), self._recipe(), self._manager())

    def bind(self, symbol: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Check a call against the real signature and record it.

        Raises:
            TypeError: The release does not take these arguments.
            KeyError: The release has no such symbol.
        """
        bound = signature(self.table, symbol).bind(*args, **kwargs)
        self.calls.append(Call(symbol, dict(bound.arguments)))
        return self.calls[-1].arguments

    def called(self, symbol: str) -> list[dict[str, Any]]:
        return [call.arguments for call in self.calls if call.symbol == symbol]

    def _recipe(self) -> SimpleNamespace:
        def make(name: str) -> Callable[..., SimpleNamespace]:
            def construct(**kwargs: Any) -> SimpleNamespace:
                self.bind(f"common.recipe.{name}.__init__", **kwargs)
                return SimpleNamespace(kind=name, **kwargs)

            return construct

        names = (
            "DelayedScaling",
            "Float8CurrentScaling",
            "Float8BlockScaling",
            "MXFP8BlockScaling",
            "NVFP4BlockScaling",
            "QParams",
        )
        known = [n for n in names if f"common.recipe.{n}.__init__" in self.table["symbols"]]
        return SimpleNamespace(Format=Format, **{name: make(name) for name in known})

    def _manager(self) -> SimpleNamespace:
        prefix = f"{self.prefix}.FP8GlobalStateManager"

        def answer(question: str) -> Callable[[], tuple[bool, str]]:
            def available() -> tuple[bool, str]:
                self.bind(f"{prefix}.{question}")
                return self.lacking.get(question, (True, ""))

            return available

        def is_first_fp8_module() -> bool:
            self.bind(f"{prefix}.is_first_fp8_module")
            first, self.state.is_first_module = self.state.is_first_module, False
            return first

        questions = [
            symbol.rpartition(".")[2]
            for symbol in self.table["symbols"]
            if symbol.startswith(f"{prefix}.is_") and symbol.endswith("_available")
        ]
        return SimpleNamespace(
            is_first_fp8_module=is_first_fp8_module,
            **{question: answer(question) for question in questions},
        )

    def update(self, forward: bool) -> None:
        """Delayed scaling with the newest maximum, for every registered layer."""
        direction = "scaling_fwd" if forward else "scaling_bwd"
        self.state.updates.append(direction)
        for layer in self.state.layers.values():
            state = layer.fp8_meta[direction]
            largest = 448.0 if forward else 57344.0
            amax = state.amax_history[0].clone()
            ran = amax > 0
            state.scale.copy_(torch.where(ran, largest / amax, state.scale))
            rolled = state.amax_history.roll(-1, 0)
            rolled[0] = 0.0
            state.amax_history.copy_(torch.where(ran, rolled, state.amax_history))

    @contextlib.contextmanager
    def _autocast(self, enabled: bool, recipe: Any, group: Any) -> Iterator[None]:
        state = self.state
        saved = (state.enabled, state.recipe, state.group, state.is_first_module)
        if state.depth == 0:
            state.is_first_module = True
        state.depth += 1
        state.enabled, state.recipe, state.group = enabled, recipe, group
        try:
            yield
        finally:
            state.enabled, state.recipe, state.group, state.is_first_module = saved
            state.depth -= 1
            if enabled and state.depth == 0 and torch.is_grad_enabled():
                self.update(forward=True)

    def _pytorch(self) -> SimpleNamespace:
        def autocast(**kwargs: Any) -> Any:
            given = self.bind("pytorch.autocast", **kwargs)
            return self._autocast(given["enabled"], given["recipe"], given["amax_reduction_group"])

        def fp8_autocast(**kwargs: Any) -> Any:
            given = self.bind("pytorch.fp8_autocast", **kwargs)
            return self._autocast(given["enabled"], given["fp8_recipe"], given["fp8_group"])

        def initialize_ub(**kwargs: Any) -> None:
            self.bind("pytorch.initialize_ub", **kwargs)
            if self.state.userbuffers:
                raise RuntimeError("UB communicators are already initialized.")
            self.state.userbuffers = True

        def destroy_ub() -> None:
            self.bind("pytorch.destroy_ub")
            self.state.userbuffers = False

        entry = {"autocast": autocast} if self.version >= (2, 9) else {"fp8_autocast": fp8_autocast}
        entry |= {"initialize_ub": initialize_ub, "destroy_ub": destroy_ub}
        if self.version >= (2, 8):
            entry["UserBufferQuantizationMode"] = UserBufferQuantizationMode
        return SimpleNamespace(
            Linear=make_linear(self, "Linear", with_norm=False),
            LayerNormLinear=make_linear(self, "LayerNormLinear", with_norm=True),
            GroupedLinear=type("FakeGroupedLinear", (FakeGroupedBase,), {"fake": self}),
            LayerNorm=make_norm(self, "LayerNorm"),
            RMSNorm=make_norm(self, "RMSNorm"),
            DotProductAttention=type(
                "FakeDotProductAttention", (FakeAttentionBase,), {"fake": self}
            ),
            **entry,
        )


class _Matmul(torch.autograd.Function):
    """`y = x w^T` with Transformer Engine's treatment of `main_grad`."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, fuse: bool, first: bool | None, after: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fuse, ctx.first, ctx.after = weight, fuse, first, after
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.after(grad)
        wgrad: Any = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.fuse:
            if ctx.first:
                ctx.weight.main_grad.copy_(wgrad)
            else:
                ctx.weight.main_grad.add_(wgrad)
            wgrad = None
            if hasattr(ctx.weight, "grad_added_to_main_grad"):
                ctx.weight.grad_added_to_main_grad = True
                zero = getattr(ctx.weight, "zero_out_wgrad", False)
                wgrad = torch.full_like(weight, 0.0 if zero else float("nan"))  # a dummy
        return grad @ weight, wgrad, None, None, None


class FakeLinearBase(nn.Module):
    """Parameters and book-keeping of `te.Linear` and `te.LayerNormLinear`."""

    is_fake = True
    fake: FakeTransformerEngine
    symbol: str
    with_norm: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = self.fake.bind(f"{self.symbol}.__init__", *args, **kwargs)
        self.tp_size, self.parallel_mode = given["tp_size"], given["parallel_mode"]
        if any(value for key, value in given.items() if key.startswith("ub_")):
            if not self.fake.state.userbuffers:
                raise AssertionError("initialize_ub() must be called before layer construction.")
            if given.get("ub_name") is None:
                raise AssertionError("Userbuffer name [string] is not set.")
        size_in, size_out = given["in_features"], given["out_features"]
        if self.parallel_mode == "column":
            size_out //= self.tp_size
        elif self.parallel_mode == "row":
            size_in //= self.tp_size
        place = {"dtype": given["params_dtype"], "device": given["device"]}
        self.sequence_parallel = given["sequence_parallel"]
        self.fuse_wgrad_accumulation = given["fuse_wgrad_accumulation"]
        self.use_bias, self.return_bias = given["bias"], given["return_bias"]
        self.fp8_meta: dict[str, Any] = {}
        self._fp8_workspaces: dict[str, Any] = {}
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.fp8_initialized = False
        self.weight_casts = 0
        self.input_scales: list[float] = []
        if self.with_norm:
            self.kind, self.eps = given["normalization"], given["eps"]
            self.layer_norm_weight = nn.Parameter(torch.ones(size_in, **place))
            has_bias = self.kind == "LayerNorm"
            shift = nn.Parameter(torch.zeros(size_in, **place)) if has_bias else None
            self.layer_norm_bias = shift
        weight = torch.empty(size_out, size_in, **place)
        given["init_method"](weight)
        self.weight = nn.Parameter(weight)
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim = 1 if self.parallel_mode == "row" else 0
        self.weight.partition_stride = 1
        if self.use_bias:
            self.bias = nn.Parameter(torch.zeros(size_out, **place))
        else:
            self.bias = torch.empty(0)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        self.fake.bind(f"{self.symbol}.init_fp8_metadata", num_gemms=num_gemms)
        state = self.fake.state
        if not state.enabled or self.fp8_initialized:
            return
        self.fp8_initialized = True
        self.fp8_meta["recipe"] = state.recipe
        if state.recipe.kind == "DelayedScaling":
            length = state.recipe.amax_history_len
            for direction, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                meta = SimpleNamespace(
                    scale=torch.ones(columns), amax_history=torch.zeros(length, columns)
                )
                self.fp8_meta[direction] = meta
                self.quantizers[direction] = [
                    SimpleNamespace(scale=meta.scale[i], amax=meta.amax_history[0][i].reshape(1))
                    for i in range(columns)
                ]

    def cast(self, direction: str, column: int, x: torch.Tensor) -> float:
        """What a cast leaves behind: the largest maximum so far. Returns the scale it took."""
        if not self.quantizers[direction]:
            return 1.0
        quantizer = self.quantizers[direction][column]
        amax = x.detach().abs().max().float()
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        return float(quantizer.scale)

    def quantize_weight(self, first: bool | None) -> None:
        if first is False and "weight" in self._fp8_workspaces:
            return
        self.weight_casts += 1
        self.cast("scaling_fwd", 1, self.weight)
        if first is not None:
            self._fp8_workspaces["weight"] = self.weight.detach().clone()

    def prepare(self, x: torch.Tensor, first: bool | None) -> bool:
        """The FP8 part of a forward; returns whether this layer's backward updates scales."""
        self.init_fp8_metadata()
        if "scaling_fwd" in self.fp8_meta:
            self.fake.state.layers[id(self)] = self
        is_first_module = self.fake.library.manager.is_first_fp8_module()
        self.input_scales.append(self.cast("scaling_fwd", 0, x))
        self.quantize_weight(first)
        return is_first_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self.fake.bind(f"{self.symbol}.forward", *args, **kwargs)
        x, first = given["inp"], given.get("is_first_microbatch")
        if x.dtype != self.weight.dtype:
            raise TypeError("Data types for parameters must match when outside of autocast")
        if self.with_norm:
            x = norm(x, self.kind, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        fp8 = self.fake.state.enabled
        block = 32 if fp8 and self.fake.state.recipe.kind == "MXFP8BlockScaling" else 8
        if fp8 and (x.numel() // x.shape[-1]) % block:
            raise AssertionError(f"FP8 execution requires the leading dimensions % {block}")
        updates = self.prepare(x, first) if fp8 else False

        def after(grad: torch.Tensor) -> None:
            if fp8:
                self.cast("scaling_bwd", 0, grad)
            if updates:
                self.fake.update(forward=False)

        y = _Matmul.apply(x, self.weight, self.fuse_wgrad_accumulation, first, after)
        if self.return_bias:
            return y, self.bias
        return y + self.bias if self.use_bias else y

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("the fake's extra state stands for a pickle: never load it")


class FakeGroupedBase(nn.Module):
    """Parameters and book-keeping of `te.GroupedLinear`."""

    is_fake = True
    fake: FakeTransformerEngine
    symbol = "pytorch.GroupedLinear"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = self.fake.bind(f"{self.symbol}.__init__", *args, **kwargs)
        self.num_gemms = count = given["num_gemms"]
        if self.fake.version < (2, 3):  # sorted by role
            self._offsets = {"input": 0, "weight": count, "output": 2 * count, "grad_output": 0}
        else:
            roles = {"input": 0, "weight": 1, "output": 2, "grad_output": 0, "grad_input": 1}
            self._offsets, self._num_fp8_tensors_per_gemm = roles, {"fwd": 3, "bwd": 2}
        self.fuse_wgrad_accumulation = given["fuse_wgrad_accumulation"]
        self.fp8_meta: dict[str, Any] = {}
        self._fp8_workspaces: dict[str, Any] = {}
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.weight_casts = [0] * count
        self.scales_used: dict[str, list[float]] = {}
        for i in range(count):
            weight = torch.empty(
                given["out_features"],
                given["in_features"],
                dtype=given["params_dtype"],
                device=given["device"],
            )
            given["init_method"](weight)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        self.fake.bind(f"{self.symbol}.init_fp8_metadata", num_gemms=num_gemms)
        state = self.fake.state
        if not state.enabled or "recipe" in self.fp8_meta:
            return
        self.fp8_meta |= {"recipe": state.recipe, "num_gemms": num_gemms}
        if state.recipe.kind == "DelayedScaling":
            length = state.recipe.amax_history_len
            for direction, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                total = columns * num_gemms
                meta = SimpleNamespace(
                    scale=torch.ones(total), amax_history=torch.zeros(length, total)
                )
                self.fp8_meta[direction] = meta
                self.quantizers[direction] = [
                    SimpleNamespace(scale=meta.scale[i], amax=meta.amax_history[0][i].reshape(1))
                    for i in range(total)
                ]

    def cast(self, role: str, expert: int, x: torch.Tensor) -> None:
        """What a cast leaves behind: the largest maximum so far, and which scale it took."""
        direction, name = ("bwd", "scaling_bwd") if "grad" in role else ("fwd", "scaling_fwd")
        if not self.quantizers[name]:
            return
        stride = getattr(self, "_num_fp8_tensors_per_gemm", {direction: 1})[direction]
        quantizer = self.quantizers[name][self._offsets[role] + expert * stride]
        self.scales_used.setdefault(role, [0.0] * self.num_gemms)[expert] = float(quantizer.scale)
        if x.numel():
            amax = x.detach().abs().max().float()
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self.fake.bind(f"{self.symbol}.forward", *args, **kwargs)
        x, splits, first = given["inp"], given["m_splits"], given.get("is_first_microbatch")
        weights = [self.get_parameter(f"weight{i}") for i in range(self.num_gemms)]
        if x.dtype != weights[0].dtype:
            raise TypeError("Data types for parameters must match when outside of autocast")
        fp8 = self.fake.state.enabled
        self.fake.library.manager.is_first_fp8_module()
        outputs = []
        for i, (part, weight) in enumerate(zip(x.split(splits), weights, strict=True)):
            if fp8 and part.shape[0] % 8:
                raise AssertionError("FP8 execution requires the product of leading dims % 8")
            if fp8:
                self.cast("input", i, part)
                if first is not False or f"weight{i}" not in self._fp8_workspaces:
                    self.weight_casts[i] += 1
                    self.cast("weight", i, weight)
                    self._fp8_workspaces[f"weight{i}"] = weight.detach().clone()

            def after(grad: torch.Tensor, expert: int = i) -> None:
                if fp8:
                    self.cast("grad_output", expert, grad)

            outputs.append(_Matmul.apply(part, weight, self.fuse_wgrad_accumulation, first, after))
        return torch.cat(outputs)

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("the fake's extra state stands for a pickle: never load it")


def make_linear(fake: FakeTransformerEngine, name: str, with_norm: bool) -> type[nn.Module]:
    members = {"fake": fake, "symbol": f"pytorch.{name}", "with_norm": with_norm}
    return type(f"Fake{name}", (FakeLinearBase,), members)


def norm(x: torch.Tensor, kind: str, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    if kind == "LayerNorm":
        return nn.functional.layer_norm(x, weight.shape, weight, bias, eps)
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


def make_norm(fake: FakeTransformerEngine, name: str) -> type[nn.Module]:
    class FakeNorm(nn.Module):
        is_fake = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            given = fake.bind(f"pytorch.{name}.__init__", *args, **kwargs)
            place = {"dtype": given["dtype"], "device": given["device"]}
            self.eps = given["eps"]
            self.weight = nn.Parameter(torch.ones(given["normalized_shape"], **place))
            self.bias = None
            if name == "LayerNorm":
                self.bias = nn.Parameter(torch.zeros(given["normalized_shape"], **place))

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            given = fake.bind(f"pytorch.{name}.forward", *args, **kwargs)
            return norm(given["input"], name, self.weight, self.bias, self.eps)

        def get_extra_state(self) -> torch.Tensor:
            return torch.zeros(4, dtype=torch.uint8)

    FakeNorm.__name__ = f"Fake{name}"
    return FakeNorm


class FakeAttentionBase(nn.Module):
    """`te.DotProductAttention`; a maximum is overwritten, as a fused kernel may."""

    is_fake = True
    fake: FakeTransformerEngine
    symbol = "pytorch.DotProductAttention"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = self.fake.bind(f"{self.symbol}.__init__", *args, **kwargs)
        self.groups = given["num_gqa_groups"] // given["tp_size"]
        self.dropout = given["attention_dropout"]
        tracker = given["get_rng_state_tracker"]
        self.fork = contextlib.nullcontext if tracker is None else tracker().fork
        self.fp8_meta: dict[str, Any] = {}
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.scales_used: list[float] = []

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        self.fake.bind(f"{self.symbol}.init_fp8_metadata", num_gemms=num_gemms)
        recipe = self.fake.state.recipe
        if not self.fake.state.enabled or "recipe" in self.fp8_meta:
            return
        self.fp8_meta["recipe"] = recipe
        delayed = recipe.kind == "DelayedScaling"
        length = recipe.amax_history_len if delayed else 1
        for direction, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            # With current scaling the last product's tensors are scaled with delay all the same.
            total, own = columns * num_gemms, columns * (num_gemms if delayed else 1)
            meta = SimpleNamespace(scale=torch.ones(own), amax_history=torch.zeros(length, own))
            self.fp8_meta[direction] = meta
            self.quantizers[direction] = [object()] * (total - own) + [
                SimpleNamespace(scale=meta.scale[i], amax=meta.amax_history[0][i].reshape(1))
                for i in range(own)
            ]

    def cast(self, direction: str, column: int, *parts: torch.Tensor) -> None:
        quantizer = self.quantizers[direction][column]
        if hasattr(quantizer, "amax"):
            quantizer.amax.fill_(max(float(x.detach().abs().max()) for x in parts))
            self.scales_used.append(float(quantizer.scale))

    def cast_gradients(self, grad: torch.Tensor) -> None:
        self.cast("scaling_bwd", 3, grad)
        self.cast("scaling_bwd", 5, grad / 2)
        self.cast("scaling_bwd", 0, grad / 4)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self.fake.bind(f"{self.symbol}.forward", *args, **kwargs)
        parts = [given[name] for name in ("query_layer", "key_layer", "value_layer")]
        state = self.fake.state
        in_fp8 = state.enabled and getattr(state.recipe, "fp8_dpa", False)
        if in_fp8:
            self.init_fp8_metadata(num_gemms=3)
            self.cast("scaling_fwd", 2, *parts)
            self.cast("scaling_fwd", 8, torch.ones(1))
        query, key, value = (part.permute(1, 2, 0, 3) for part in parts)
        with self.fork():
            out = nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=True,
                enable_gqa=True,
            )
        context = out.permute(2, 0, 1, 3).flatten(2)
        if in_fp8:
            self.cast("scaling_fwd", 3, context)
            if context.requires_grad:
                context.register_hook(self.cast_gradients)
        return context

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.uint8)
