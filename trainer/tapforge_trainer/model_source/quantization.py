"""Whether a model's weights are quantized, which a learner can't train: read from what its JSON files say and from the
number formats of its tensors. Pure.

A quantized weight is stored as small whole or 8 bit numbers that count only together with scales in other tensors.
Read as they stand they are another model, up to thousands of times too large, and nothing else shows it: FP8, INT8 and
bitsandbytes' 8 bit weights keep the names and shapes of the plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

#: files that say how a model was quantized, beside config.json: older AutoAWQ, older AutoGPTQ, ModelOpt
DOCUMENTS: Final = ("config.json", "quant_config.json", "quantize_config.json", "hf_quant_config.json")
#: fields of config.json that say so; the last one is MLX's
_FIELDS: Final = ("quantization_config", "compression_config", "quantization")
#: number formats of safetensors whose numbers count as they stand
_PLAIN: Final = frozenset({"F64", "F32", "F16", "BF16"})
#: of tensors that are not weights: indices and masks
_COUNTS: Final = frozenset({"I64", "BOOL"})
#: ends of the names of what a quantized weight's numbers are scaled by, or packed into
_PARTS: Final = (
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_zero_point",
    ".weight_packed",
    ".input_scale",
    "_scale_inv",
    ".SCB",
    ".absmax",
    ".quant_map",
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".scales",
)
_REMEDY: Final = (
    "name the model that it was quantized from (usually its repository without the last part of the name), whose "
    "weights are bfloat16; where memory is short, train that one with spec.model.lora"
)


def quantization_of(documents: Mapping[str, Any], tensors: Mapping[str, str] | None = None) -> str | None:
    """Why the weights can't be trained, as a predicate with its remedy ("holds ..."); None: they are plain numbers.
    `documents`: contents of `DOCUMENTS` by name, as far as there are some; `tensors`: number formats by name, as
    headers of safetensors say; None: they were not read."""
    told = _told(documents)
    seen = None if tensors is None else _seen(tensors)
    if told is None and seen is None:
        return None
    if tensors and seen is None:
        return (
            f"says that its weights are quantized ({told}), but they are plain numbers: a tool that restored them has "
            "left the field behind, and an engine would quantize them again; delete it"
        )
    how = "; ".join(part for part in (told, seen) if part is not None)
    left = "" if seen is not None else "; where the weights are plain after all, delete what says otherwise"
    return f"holds quantized weights ({how}), which can't be trained: {_REMEDY}{left}"


def _told(documents: Mapping[str, Any]) -> str | None:
    """What the files say, with the file's name."""
    for name, document in documents.items():
        if not isinstance(document, Mapping):
            continue
        if name != "config.json":
            if not (method := _method(document)):
                continue  # ModelOpt writes its file also where the cache alone is quantized
            return f"{name}: {method}"
        for field, found in _fields(document):
            return f"config.json: {field} {_method(found) or 'is set'}"
    return None


def _fields(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Of a configuration and of the ones within it."""
    for name, value in document.items():
        if name in _FIELDS and value:
            yield above + name, value
        elif name.endswith("_config") and isinstance(value, Mapping):
            yield from _fields(value, f"{above}{name}.")


def _method(found: Any) -> str:
    """The method, and its format or bits."""
    if not isinstance(found, Mapping):
        return str(found)[:60]
    inner = found.get("quantization")
    if isinstance(inner, Mapping):  # ModelOpt's own file
        found = inner
    method = found.get("quant_method") or found.get("quant_algo") or found.get("method")
    bits = found.get("bits", found.get("w_bit"))
    if bits is None:
        bits = next((n for n in (4, 8) if found.get(f"load_in_{n}bit")), None)
    details = [str(found[name]) for name in ("quant_algo", "fmt", "format") if found.get(name) not in (None, method)]
    details += [f"{bits} bit"] if bits is not None else []
    return " ".join(str(part) for part in (method, *details) if part)[:100]


def _seen(tensors: Mapping[str, str]) -> str | None:
    """What the tensors show."""
    for name, kind in tensors.items():
        if kind not in _PLAIN and kind not in _COUNTS:
            return f"{name} is {kind}"
    return next((f"{name} is there" for name in tensors if name.endswith(_PARTS)), None)
