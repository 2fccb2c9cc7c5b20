"""FP8 attention on CUDA: the native kernel and Transformer Engine's, against the CPU's."""

from __future__ import annotations

import pytest
import torch

from megatron.core.backends.native import NativeBackend
from megatron.core.backends.te import TransformerEngineBackend
from megatron.core.errors import PrecisionError
from tests.gpu import attention_cases, cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", list(cases.RECIPES))
def test_the_native_one_is_the_cpus(device, report, recipe):
    """The same roundings; sums in another order move single values to the next code."""
    error = report(attention_cases.agree(device, NativeBackend(), recipe))
    assert max(error[name] for name in ("out", "dq", "dk", "dv")) < 6e-3
    assert error["scale"] < 1e-3


@pytest.mark.parametrize("recipe", list(cases.RECIPES))
def test_transformer_engines_rounds_at_the_same_places(device, report, recipe):
    """Its fused kernel rounds unfinished probabilities: errors of both are those of FP8, apart."""
    backend = TransformerEngineBackend()
    able, reason = backend.availability()
    if not able:
        pytest.skip(reason)
    capability = torch.cuda.get_device_capability(device)
    if recipe == "tensorwise" and capability < (10, 0):
        with pytest.raises(PrecisionError, match="compute capability 10.0"):
            attention_cases.agree(device, backend, recipe)
        return
    error = report(attention_cases.agree(device, backend, recipe))
    assert error["out"] < 0.1
    assert max(error["dq"], error["dk"], error["dv"]) < 0.2
