"""How a base model's folder spells what an export holds as well, so that an export loads wherever its base loads.

- config.json is the base's own, field by field, but for the number format of the weights: transformers 4 and engines on
  it don't know the fields that transformers 5 writes (`rope_parameters`, `dtype`), and take defaults in their place.
- Tensors have the names that they have in the base's files, and lie as they lie there: the older families' names begin
  without `model.language_model`, and experts are (experts, in, out) in some files and (experts, out, in) in others.
- A head that is the embedding is a tensor of its own where the base's files have one.
- All other files that a loader may read are the base's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..placement.settings import PROMPTED
from .families import FolderError, family_named

if TYPE_CHECKING:
    from torch import Tensor

#: transformers 5's field of config.json and transformers 4's
_DTYPE: Final = ("dtype", "torch_dtype")
#: endings of files that are not carried over: weights in any format, and what lists them
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_CONFIG: Final = "config.json"
#: what is written anew
_FRESH: Final = (_CONFIG, PROMPTED)
#: the one folder below a model's that a loader reads: named chat templates
_TEMPLATES: Final = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the base's files."""

    name: str
    #: it lies there as the model has it, and not as engines take it
    as_parameter: bool = False


def exported_config(base: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of an export in `dtype`: the base's, with that number format wherever one is named, at the top or in
    a part of the model."""

    def renamed(key: str, value: Any) -> Any:
        if key in _DTYPE and value is not None:
            return dtype
        return exported_config(value, dtype) if isinstance(value, Mapping) else value

    return {key: renamed(key, value) for key, value in base.items()}


def write_config(base: Path, folder: Path, dtype: str) -> None:
    """`base`: the base model's folder. Raises OSError."""
    document = json.loads((base / _CONFIG).read_text())
    text = json.dumps(exported_config(document, dtype), indent=2, ensure_ascii=False)
    (folder / _CONFIG).write_text(text + "\n")


def add_files(base: Path, folder: Path) -> None:
    """Tokenizer, processor, chat templates, generation settings, code, licence: copies of the base's."""
    for path in base.iterdir():
        if path.is_file() and path.name not in _FRESH and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    if (base / _TEMPLATES).is_dir():
        shutil.copytree(base / _TEMPLATES, folder / _TEMPLATES, copy_function=shutil.copyfile, dirs_exist_ok=True)


def stored_tensors(base: Path, model: Any, parameters: Iterable[str]) -> dict[str, tuple[Stored, ...]]:
    """Parameter of transformers' `model` -> the tensors that the base's files hold of it: two, where the head is the
    embedding and is in the files all the same. `parameters`: names. Raises FolderError for one that is in no file."""
    from .sharding import tensors_of

    family, files = family_named(model.config.model_type), tensors_of(base)
    published = {family.parameter_of(name): name for name in files}
    found: dict[int, list[Stored]] = {}
    everything = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in everything.items():
        if (source := published.get(name)) is not None:
            own = family.swapped(name) and tuple(files[source].size) != tuple(family.for_engine(name, parameter).shape)
            found.setdefault(id(parameter), []).append(Stored(source, as_parameter=own))
    names = {name: tuple(found.get(id(everything[name]), ())) for name in parameters}
    if gone := [name for name, places in names.items() if not places]:
        raise FolderError(f"{base} has no tensor {gone[0]} any more: put back the model that training began with")
    return names


def as_stored(tensor: Tensor, places: tuple[Stored, ...]) -> Iterator[tuple[str, Tensor]]:
    """Name and values in the base's layout of each tensor that a parameter is there; `tensor`: as engines take it. Each
    has memory of its own, which safetensors asks for."""
    for number, place in enumerate(places):
        own = tensor.transpose(-1, -2) if place.as_parameter else tensor
        yield place.name, own.clone().contiguous() if number else own.contiguous()
