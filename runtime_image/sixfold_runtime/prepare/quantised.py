"""Quantised checkpoints as verification sees them: which kinds are read, and the full weights that they stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sixfold_api.precision import Scheme
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import CONFIG
from sixfold_runtime.prepare.weights import DTYPES, TensorEntry

INT8_METHOD = "sixfold-int8"
_SCHEMES = {"gptq": Scheme.GPTQ, INT8_METHOD: Scheme.INT8}
_GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_LAYOUTS = ("gptq", "gptq_v2")
_WORD_BITS = 32
_BITS = (2, 3, 4, 8)


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """How a folder's weights are stored, by its config.json.

    Raises PreparationError(UnsupportedFormat) for a kind that the engine doesn't read.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return Scheme.NONE
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in _SCHEMES:
        raise PreparationError(
            Reason.UNSUPPORTED_FORMAT,
            f"{CONFIG} describes weights quantised by {method!r}: GPTQ checkpoints are read, others must be published "
            "in full precision (precision.scheme quantises them here)",
        )
    layout = quantization.get("checkpoint_format") or "gptq"
    if layout not in _LAYOUTS:
        raise PreparationError(
            Reason.UNSUPPORTED_FORMAT,
            f"{CONFIG} says checkpoint_format {layout!r}: {' and '.join(_LAYOUTS)} are read; save it as one of them",
        )
    return _SCHEMES[method]


def full_tensors(tensors: Mapping[str, TensorEntry], scheme: Scheme) -> dict[str, TensorEntry]:
    """The entries that the checkpoint would have in full precision, for the comparison with the model.

    Raises PreparationError(CorruptWeights) if the tensors of a quantised module don't belong together.
    """
    if scheme is Scheme.GPTQ:
        return _full_gptq(tensors)
    if scheme is Scheme.INT8:
        return _full_int8(tensors)
    packed = next((name for name in tensors if name.endswith(".qweight")), None)
    if packed is not None:
        raise PreparationError(
            Reason.UNSUPPORTED_FORMAT,
            f"{packed} is quantised, and {CONFIG} does not say how: put what quantize_config.json says into it as "
            '`quantization_config`, with "quant_method": "gptq"',
        )
    return dict(tensors)


def _full_gptq(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    full = dict(tensors)
    modules = sorted(name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))
    if not modules:
        raise PreparationError(Reason.CORRUPT_WEIGHTS, f"{CONFIG} says GPTQ, and no tensor is called qweight")
    for module in modules:
        parts = {part: full.pop(f"{module}.{part}", None) for part in _GPTQ_PARTS}
        for part, entry in parts.items():
            if entry is None:
                raise _broken(module, f"there is no {module}.{part}")
        full[f"{module}.weight"] = _gptq_weight(module, *(entry for entry in parts.values() if entry is not None))
    return full


def _gptq_weight(
    module: str, qweight: TensorEntry, qzeros: TensorEntry, scales: TensorEntry, g_idx: TensorEntry
) -> TensorEntry:
    """Integers of `bits` bits in 32-bit words: qweight [words, out], qzeros [groups, words], scales [groups, out]."""
    if len(g_idx.shape) != 1 or not g_idx.shape[0] or any(len(e.shape) != 2 for e in (qweight, qzeros, scales)):
        raise _broken(module, "the shapes are none of GPTQ")
    (inputs,), (groups, outputs) = g_idx.shape, scales.shape
    bits = qweight.shape[0] * _WORD_BITS // inputs
    expected = {
        "qweight": (qweight.shape, (math.ceil(inputs * bits / _WORD_BITS), outputs)),
        "qzeros": (qzeros.shape, (groups, math.ceil(outputs * bits / _WORD_BITS))),
    }
    for part, (found, wanted) in expected.items():
        if bits not in _BITS or found != wanted:
            raise _broken(module, f"{part} has shape {list(found)}, and {bits} bits need {list(wanted)}")
    return TensorEntry(f"{module}.weight", scales.dtype, (outputs, inputs), 0, 0)


def _full_int8(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    full = dict(tensors)
    modules = sorted(name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale"))
    if not modules:
        raise PreparationError(Reason.CORRUPT_WEIGHTS, f"{CONFIG} says INT8, and no tensor is called weight_scale")
    for module in modules:
        scale, weight = full.pop(f"{module}.weight_scale"), tensors.get(f"{module}.weight")
        if weight is None or weight.dtype is not DTYPES["I8"] or scale.shape != weight.shape[:1]:
            raise _broken(module, "it needs an int8 weight [out, in] and its weight_scale [out]")
        full[f"{module}.weight"] = TensorEntry(weight.name, scale.dtype, weight.shape, 0, 0)
    return full


def _broken(module: str, what: str) -> PreparationError:
    return PreparationError(
        Reason.CORRUPT_WEIGHTS, f"the quantised weights of {module} don't belong together: {what}. Quantise them anew"
    )
