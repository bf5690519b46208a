"""What is wrong with a model folder in Hugging Face's layout, before it is loaded: read from names, sizes and the
headers of its safetensors files, in milliseconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from .quantization import DOCUMENTS, quantization_of
from .ref import WEIGHTS, ModelRef, ModelRefused

_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """As the header of a safetensors file has it."""

    #: number format, such as BF16
    kind: str
    shape: list[int]


def folder_faults(folder: Path) -> list[str]:
    """Why a folder is not a whole model in Hugging Face's layout whose weights are plain numbers, as predicates
    ("lacks ..."); empty: it is one."""
    fault = quantization_fault(folder)
    return [fault] if fault is not None else incomplete(folder)


def quantization_fault(folder: Path, *, weights: bool = True) -> str | None:
    """Why the weights can't be trained though all of them may be there, as a predicate. Without `weights` by what the
    folder's JSON files say alone. Files that can't be read say nothing: `incomplete` names them."""
    documents: dict[str, Any] = {}
    for name in DOCUMENTS:
        try:
            documents[name] = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
    if not weights:
        return quantization_of(documents)
    names = names_of(folder)
    packed = sorted(name for name in names if name.endswith(".gguf"))
    if packed and not any(fnmatch(name, WEIGHTS) for name in names):
        return quantization_of({packed[0]: {"quant_method": "GGUF"}})
    headers = [_header(path) for path in _shards(folder) or sorted(folder.glob(WEIGHTS)) if path.is_file()]
    kinds = {name: one.kind for header in headers if not isinstance(header, str) for name, one in header.items()}
    return quantization_of(documents, kinds or None)


def incomplete(folder: Path) -> list[str]:
    """Why a folder does not hold all of a model that fits its config.json, as predicates: to be fetched again."""
    if lacking := lacking_of(names_of(folder)):
        return [f"lacks {', '.join(lacking)}"]
    shards, faults = _shards(folder), []
    if shards is None:
        return [f"has a broken {_INDEX}: fetch it again"]
    if missing := [path.name for path in shards if not path.is_file()]:
        return [f"lacks {len(missing)} of the {len(shards)} shards that {_INDEX} names: {', '.join(missing[:4])}"]
    shapes: dict[str, list[int]] = {}
    for path in shards or sorted(folder.glob(WEIGHTS)):
        header = _header(path)
        if isinstance(header, str):
            faults.append(f"has {path.name}, which {header}")
        else:
            shapes |= {name: one.shape for name, one in header.items()}
    return faults or _against_config(folder, shapes)


def _shards(folder: Path) -> list[Path] | None:
    """The files that the index names; empty without an index, None for one that can't be read."""
    index = folder / _INDEX
    if not index.is_file():
        return []
    try:
        return sorted({folder / Path(str(name)).name for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def names_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def lacking_of(names: set[str], *, weights: bool = True) -> list[str]:
    needed = {
        "config.json": ("config.json",),
        "a tokenizer (tokenizer.json or vocab.json)": ("tokenizer.json", "vocab.json"),
    } | ({"weights (*.safetensors)": (WEIGHTS,)} if weights else {})
    return [what for what, patterns in needed.items() if not any(fnmatch(name, p) for name in names for p in patterns)]


def _header(path: Path) -> dict[str, _Tensor] | str:
    """Tensors by name of a safetensors file; else what is wrong with it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            return "is not a safetensors file (a pointer of Git LFS, or a download that broke off): fetch it again"
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            tensors = {name: value for name, value in header.items() if name != "__metadata__"}
            end = 8 + length + max((value["data_offsets"][1] for value in tensors.values()), default=0)
            found = {
                name: _Tensor(str(value["dtype"]), [int(side) for side in value["shape"]])
                for name, value in tensors.items()
            }
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return "is not a safetensors file: fetch it again"
    return found if size == end else f"has {size:,} bytes instead of {end:,}: fetch it again"


def _against_config(folder: Path, shapes: dict[str, list[int]]) -> list[str]:
    """What config.json says otherwise than the weights: width, rows of the embedding, layers."""
    try:
        config = json.loads((folder / "config.json").read_text())
        text = dict(config.get("text_config") or config)
    except (ValueError, TypeError, AttributeError):
        return ["has a config.json that is not a JSON object: fetch it again"]
    embedding = next((s for n, s in shapes.items() if n.endswith("embed_tokens.weight") and len(s) == 2), None)
    told = [text.get("vocab_size"), text.get("hidden_size")]
    if embedding is not None and None not in told and list(embedding) != told:
        return [f"contradicts itself: config.json says {told[0]} tokens of width {told[1]}, the weights {embedding}"]
    # Towers of other families, which judges may be of, are vision_tower or vision_model.
    ours = (n for n in shapes if ".layers." in n and "visual" not in n and "vision" not in n)
    layers = {n.split(".layers.")[1].split(".")[0] for n in ours}
    said = text.get("num_hidden_layers")
    if layers and said is not None and len(layers) != said:
        return [f"contradicts itself: config.json says {said} layers, the weights have {len(layers)}"]
    return []


def complete(ref: ModelRef) -> ModelRef:
    """Checked before gigabytes are fetched of something other than a model."""
    names = {file.name for file in ref.files}
    if lacking := lacking_of(names):
        raise ModelRefused(f"{ref.shown} lacks {', '.join(lacking)}: name a model in Hugging Face's layout")
    return ref
