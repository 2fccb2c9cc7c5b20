"""Memory: what a rank uses, and what its model, optimizer and activations should need."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from megatron.config import RunConfig
from megatron.config.moe import moe_layers
from megatron.observe.events import MemoryUse

# Linux reports the peak in KiB, macOS in bytes.
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024


def _resident_bytes() -> int:
    """Return the process's resident memory now, its peak where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT
    return pages * resource.getpagesize()


def measure(rank: int, iteration: int, device: torch.device, routine: bool = False) -> MemoryUse:
    """Measure this rank: the allocator's figures on CUDA, the process's resident memory on CPU."""
    if device.type == "cuda":
        return MemoryUse(
            rank=rank,
            iteration=iteration,
            source="cuda",
            allocated_bytes=torch.cuda.memory_allocated(device),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(device),
            routine=routine,
        )
    now = _resident_bytes()
    peak = max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT)
    return MemoryUse(
        rank=rank,
        iteration=iteration,
        source="process",
        allocated_bytes=now,
        peak_allocated_bytes=peak,
        reserved_bytes=now,
        peak_reserved_bytes=peak,
        routine=routine,
    )


def matrix_parameters(cfg: RunConfig) -> tuple[int, int]:
    """Return the parameters of all matrices and embeddings but the experts', and the experts'."""
    h, matrices = cfg.hidden_size, 3 if cfg.swiglu else 2
    q = cfg.kv_channels * cfg.num_attention_heads
    kv = cfg.kv_channels * cfg.num_query_groups
    moe = sum(moe_layers(cfg))
    dense = cfg.num_layers * (h * (q + 2 * kv) + q * h)
    dense += (cfg.num_layers - moe) * matrices * h * cfg.ffn_hidden_size
    copies = 2 if cfg.untie_embeddings_and_output_weights else 1
    dense += copies * cfg.padded_vocab_size * h
    if not moe:
        return dense, 0
    shared = cfg.moe_shared_expert_intermediate_size or 0
    dense += moe * h * (cfg.num_experts + matrices * shared)
    return dense, moe * cfg.num_experts * matrices * h * cfg.moe_ffn_hidden_size


def fp8_parameters(cfg: RunConfig) -> tuple[float, float]:
    """Return how many of `matrix_parameters` are gathered as FP8 codes and rest so."""
    if not cfg.fp8_param_gather or cfg.fp8_recipe == "mxfp8":  # cut twice, two bytes an element
        return 0.0, 0.0
    dense, experts = matrix_parameters(cfg)
    copies = 2 if cfg.untie_embeddings_and_output_weights else 1
    dense -= copies * cfg.padded_vocab_size * cfg.hidden_size
    dense -= sum(moe_layers(cfg)) * cfg.hidden_size * (cfg.num_experts or 0)  # routers
    kept = 0
    if cfg.first_last_layers_bf16:
        kept = cfg.num_layers_at_start_in_bf16 + cfg.num_layers_at_end_in_bf16
    share = max(0.0, 1.0 - kept / cfg.num_layers)
    return dense * share, experts * share


def _layer_activations(cfg: RunConfig, tokens: float, has_experts: bool) -> float:
    """Return the bytes that a layer keeps of a microbatch of `tokens` tokens."""
    h, tp = float(cfg.hidden_size), float(cfg.tensor_model_parallel_size)
    selective = cfg.sequence_parallel and cfg.recompute_granularity == "selective"
    if has_experts:
        width = float(cfg.moe_router_topk * cfg.moe_ffn_hidden_size)
        width += cfg.moe_shared_expert_intermediate_size or 0
        # A token's copy for each of its experts is kept before and after them.
        copies = 4.0 * int(cfg.moe_router_topk)
        if selective:
            return tokens * h * (18.0 + copies + 4.0 * width / h) / tp
        return tokens * h * (10.0 + (8.0 + copies + 4.0 * width / h) / tp)
    if selective:
        return tokens * h * (18.0 + 4.0 * float(cfg.ffn_hidden_size) / h) / tp
    return tokens * h * (10.0 + 24.0 / tp)


def theoretical_bytes(cfg: RunConfig) -> tuple[float, float]:
    """Estimate what a rank of the first pipeline stage needs: (weights and optimizer, activations).

    In bytes. The stage holds its share of the layers and the embedding; 1F1B keeps the activations
    of as many microbatches as there are stages in flight, so that share does not count there.

    Weights and optimizer: 18 bytes a parameter (BF16 weight, FP32 gradient, master and two Adam
    moments); the distributed optimizer spreads 12 of them over the replicas of an instance. A
    weight that rests in FP8 has a byte less; without the distributed optimizer, what FP8 gradients
    keep for the next step takes 4 more. Experts are spread over expert-parallel ranks, and their
    replicas are fewer. Activations of a layer with
    sequence parallelism and a recomputed attention core: s b h (18 + 4 f / h); otherwise
    s b h (10 + 24 / tp). In a layer with experts f is the width that a token passes, and its copies
    for k experts take 4 s b h k more; loads are taken to be even. Source: Korthikanti et al.,
    "Reducing Activation Recomputation in Large Transformer Models", 2022.
    """
    tp, pp = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size
    expert_ranks = cfg.expert_tensor_parallel_size * cfg.expert_model_parallel_size
    shares = expert_shares = 1.0
    if cfg.use_distributed_optimizer:
        replicas = cfg.data_parallel_size * cfg.context_parallel_size
        instances = cfg.num_distributed_optimizer_instances
        shares = replicas / instances
        expert_shares = max(1.0, replicas * tp / expert_ranks / instances)
    dense, experts = (float(count) for count in matrix_parameters(cfg))
    if pp > 1:
        table = cfg.padded_vocab_size * cfg.hidden_size
        copies = 2 if cfg.untie_embeddings_and_output_weights else 1
        dense = (dense - copies * table) / pp + table
    each = 6.0
    if cfg.grad_reduce_dtype == "fp8" and not cfg.use_distributed_optimizer:
        sends = cfg.data_parallel_size * cfg.context_parallel_size > 1
        each += 4.0 if sends and cfg.grad_reduce_error_feedback else 0.0
    weights = (each + 12.0 / shares) * dense / tp
    weights += (each + 12.0 / expert_shares) * experts / pp / expert_ranks
    in_fp8, experts_in_fp8 = fp8_parameters(cfg)
    weights -= (in_fp8 / tp + experts_in_fp8 / expert_ranks) / pp
    tokens = cfg.seq_length * cfg.micro_batch_size / cfg.context_parallel_size
    h = cfg.hidden_size
    layers = sum(_layer_activations(cfg, tokens, kind) for kind in moe_layers(cfg))
    ends = 8.0 * tokens + tokens * h
    if pp == 1:
        ends += 4.0 * tokens * h * (1.0 + cfg.padded_vocab_size / h)
    in_flight = cfg.batches().largest // (cfg.micro_batch_size * cfg.data_parallel_size)
    if cfg.pipeline_schedule != "gpipe":  # zb-h1 keeps as many on every rank
        virtual = cfg.virtual_pipeline_model_parallel_size
        # Virtual stages keep 1 + (p - 1) / (p v) as much (Narayanan et al., SC 2021).
        most = pp if virtual == 1 else pp + (pp - 1) / virtual
        in_flight = min(in_flight, most)
    return weights, in_flight * (layers / pp + ends / tp)
