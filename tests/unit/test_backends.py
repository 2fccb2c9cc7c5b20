"""Backend choice and what the machine is said to have."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megatron.config import make_config
from megatron.core.backends.contract import Backend
from megatron.core.backends.native import NativeBackend
from megatron.core.backends.registry import backends, choose, resolve
from megatron.core.backends.te import TransformerEngineBackend
from megatron.core.capability import cpu_bf16_gemm, gemm_dtype
from megatron.core.errors import BackendUnavailable


@dataclass
class Fake:
    name: str
    able: bool = True
    reason: str = "because"

    def availability(self):
        return self.able, self.reason


def test_auto_takes_the_first_that_can_run_and_says_why_not_the_others():
    chosen, reason = resolve("auto", "cuda", [Fake("a", False, "no a here"), Fake("b"), Fake("c")])
    assert chosen.name == "b"
    assert "because" in reason
    assert "a: no a here" in reason


def test_a_name_is_taken_literally():
    chosen, reason = resolve("c", "cpu", [Fake("b"), Fake("c")])
    assert chosen.name == "c"
    assert "by name" in reason


@pytest.mark.parametrize("name", ["transformer_engine", "nonsense"])
def test_an_explicit_name_that_cannot_run_lists_every_backend_with_its_reason(name):
    candidates = [Fake("transformer_engine", False, "not installed"), Fake("native", True, "torch")]
    with pytest.raises(BackendUnavailable) as raised:
        resolve(name, "cpu", candidates)
    text = str(raised.value)
    for part in ("--transformer-impl", name, "not installed", "native: can run", "auto"):
        assert part in text


def test_transformer_engine_is_not_chosen_for_a_cpu_run_on_a_cuda_machine():
    chosen, reason = resolve("auto", "cpu", [Fake("transformer_engine"), Fake("native")])
    assert chosen.name == "native"
    assert "CUDA devices only" in reason


def wanted(impl="transformer_engine", fp8_format="e4m3", fp8_recipe="mxfp8", **fields):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
    if fp8_format is not None:
        fields |= {"fp8_format": fp8_format, "fp8_recipe": fp8_recipe}
    return make_config(
        1, **sizes, vocab_size=128, bf16=True, mock_data=True, transformer_impl=impl, **fields
    )


NO_TE = [Fake("transformer_engine", False, "not installed"), Fake("native", True, "torch")]


def test_fp8_on_a_backend_that_is_missing_is_an_error_that_names_the_way_on():
    with pytest.raises(BackendUnavailable, match="not installed.*--fp8-allow-fallback"):
        choose(wanted(), "cpu", NO_TE)
    # The flag is about FP8: a BF16 run on a backend that is missing has nothing to fall back from.
    with pytest.raises(BackendUnavailable):
        choose(wanted(fp8_format=None, fp8_allow_fallback=True), "cpu", NO_TE)


def test_fp8_may_fall_back_to_native_with_one_warning():
    choice = choose(wanted(fp8_allow_fallback=True), "cpu", NO_TE)
    assert choice.backend.name == "native"
    assert choice.warning.startswith("transformer_engine was asked for and cannot run (not instal")
    assert choose(wanted("native"), "cpu", NO_TE).warning == ""
    assert choose(wanted("auto"), "cpu", NO_TE).warning == ""


def test_a_recipe_that_transformer_engine_lacks_here_counts(monkeypatch):
    te = TransformerEngineBackend()
    monkeypatch.setattr(te, "availability", lambda: (True, "2.20 on a GPU"))
    monkeypatch.setattr(te, "recipe_support", lambda name: (name != "mxfp8", "needs 10.0"))
    known = [te, Fake("native", True, "torch")]
    assert choose(wanted(fp8_recipe="delayed"), "cuda", known).backend is te
    assert choose(wanted("auto"), "cuda", known).backend.name == "native"
    assert choose(wanted("auto", fp8_format=None), "cuda", known).backend is te
    with pytest.raises(
        BackendUnavailable, match="does not run the recipe mxfp8 on this device: needs 10.0"
    ):
        choose(wanted(), "cuda", known)
    choice = choose(wanted(fp8_allow_fallback=True), "cuda", known)
    assert choice.why == "it does not run the recipe mxfp8 on this device: needs 10.0"


class Silent(Fake):
    """A backend that may not be asked: to answer, it would import a library."""

    def availability(self):
        raise AssertionError(f"{self.name} was asked")


def test_only_those_that_may_be_chosen_are_asked():
    assert resolve("native", "cuda", [Silent("te"), Fake("native")])[0].name == "native"
    assert resolve("auto", "cuda", [Fake("te"), Silent("native")])[0].name == "te"


def test_nothing_can_run():
    with pytest.raises(BackendUnavailable, match="auto"):
        resolve("auto", "cpu", [Fake("a", False)])


def test_local_means_native():
    assert resolve("local", "cpu")[0].name == "native"


def test_the_real_backends_keep_the_contract():
    assert [b.name for b in backends()] == ["transformer_engine", "native"]
    assert isinstance(NativeBackend(), Backend)
    assert NativeBackend().availability()[0]


def test_on_this_cpu_auto_is_native():
    backend, reason = resolve("auto", torch.device("cpu"))
    assert backend.name == "native"
    assert "transformer_engine" in reason


def test_gemm_dtype_widens_only_what_the_cpu_cannot_multiply():
    cpu = torch.device("cpu")
    assert gemm_dtype(torch.float32, cpu) == torch.float32
    assert gemm_dtype(torch.float64, cpu) == torch.float64
    assert gemm_dtype(torch.float16, cpu) == torch.float32
    assert gemm_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    expected = torch.bfloat16 if cpu_bf16_gemm().present else torch.float32
    assert gemm_dtype(torch.bfloat16, cpu) == expected
