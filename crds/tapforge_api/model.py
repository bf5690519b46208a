"""The policy of a run: where its weights come from, in what number format, with which adapter and images.

A field that is left out and whose default depends on the hardware is None here; the trainer's `run/assembly.py`
fills it in.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import UNIQUE, OneOf, Path, Rule, Spec, Uri, Word


class TinyModel(Spec):
    """The tiny Qwen3-VL that tapforge builds itself; nothing is downloaded."""

    weights: Literal["base", "judge"] = Field(
        "base",
        description="base: a model that finds what a sentence means on a screen, to be trained; judge: one that says "
        "whether an episode of the simulated phone's quickstart suite succeeded, for `models`",
    )


class ModelFolder(Spec):
    """A model in a folder, in Hugging Face's layout."""

    folder: Path = Field(description="folder with config.json, tokenizer and safetensors")


class HuggingFaceModel(Spec):
    """A model of a Hugging Face repository."""

    repo: Annotated[str, Field(min_length=3, max_length=200, pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$")] = Field(
        description="repository, as OWNER/NAME"
    )
    revision: Word = Field("main", description="branch, tag or commit; pin a commit for runs that can be repeated")


class ObjectStorageModel(Spec):
    """A model in object storage. Each node of the run fetches it once."""

    uri: Uri = Field(description="folder in Hugging Face's layout, such as s3://BUCKET/FOLDER or gs://BUCKET/FOLDER")


class ModelSource(OneOf):
    """Where the initial weights come from."""

    tiny: TinyModel | None = Field(None, description="the built-in tiny model; write `tiny: {}`")
    path: ModelFolder | None = Field(None, description="a folder: on a cluster one that every node mounts")
    hugging_face: HuggingFaceModel | None = Field(None, description="a repository of Hugging Face")
    object_storage: ObjectStorageModel | None = Field(None, description="a folder in object storage")


Pixels = Annotated[int, Field(ge=784, le=67_108_864)]


class Lora(Spec):
    """Low-rank adapters instead of all weights: the model itself stays as it is, and is the reference of a KL term."""

    rank: Annotated[int, Field(ge=1, le=4096)] = Field(32, description="rank of each adapter's two matrices")
    alpha: Annotated[float, Field(gt=0, le=65536)] = Field(64.0, description="scale: adapters count alpha / rank times")
    targets: Annotated[tuple[Word, ...], Field(max_length=64), UNIQUE] = Field(
        (),
        description="names of the language model's linear layers that get adapters, such as q_proj; without any those "
        "of attention and MLP",
    )


class SlidingHistory(Spec):
    """The newest historyImages screens, and the newest historySteps answers."""


class HistoryBlocks(Spec):
    """Screens are added until there are upTo, then the window moves at once: prompts extend each other."""

    keep: Annotated[int, Field(ge=1, le=63)] = Field(
        2, description="screens that are left when the window moves, the current one included"
    )
    up_to: Annotated[int, Field(ge=2, le=64)] = Field(
        6, description="screens in a prompt at most, the current one included; takes the place of historyImages"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="keep must be < upTo: the window has to move by a screen at least",
            cel="self.keep < self.upTo",
            holds=lambda o: o.keep < o.up_to,
        ),
    )


class History(OneOf):
    """Which earlier steps a prompt shows."""

    sliding: SlidingHistory | None = Field(None, description="the newest ones; write `sliding: {}`")
    blocks: HistoryBlocks | None = Field(
        None, description="a window that grows and moves in blocks, for samples and caches that are shared by steps"
    )


class Adapter(Spec):
    """How screens and history become a prompt, and an answer an action."""

    name: Word = Field("qwen3-vl", description="model adapter: prompt format, action format and coordinate convention")
    prompt: Literal["full", "compact", "turns"] = Field(
        "full",
        description="full: the model's published system prompt with its tools; compact: goal and history only, in one "
        "message; turns: the same, with a turn for each earlier screen that is shown",
    )
    prompt_file: Path | None = Field(
        None,
        description="Jinja template of the prompt instead of the adapter's own, for models that want theirs verbatim",
    )
    context: Word | None = Field(
        None, description="entry point of the group tapforge.contexts that adds text or images to each prompt"
    )
    history_images: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="frames in the prompt, the current one included"
    )
    history: History = Field(
        History(sliding=SlidingHistory()), description="which earlier steps a prompt shows; exactly one member"
    )
    history_steps: Annotated[int, Field(ge=0, le=512)] = Field(
        16, description="earlier answers in the prompt, as text; the oldest go first"
    )
    max_pixels: Annotated[int, Field(ge=1024, le=67_108_864)] | None = Field(
        None,
        description="older name of model.maxPixels",
    )
    max_parse_failures: Annotated[int, Field(ge=1, le=100)] = Field(
        3, description="malformed answers in a row after which an episode fails"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="history.blocks needs prompt full or turns: a compact prompt has no turns",
            cel="!has(self.history.blocks) || self.prompt != 'compact'",
            holds=lambda o: o.history.blocks is None or o.prompt != "compact",
        ),
        Rule(
            message="historyImages must be left out with history.blocks, whose upTo takes its place",
            cel="!has(self.history.blocks) || self.historyImages == 1",
            holds=lambda o: o.history.blocks is None or o.history_images == 1,
        ),
    )

    @property
    def images(self) -> int:
        """Frames in a prompt at most, the current one included."""
        return self.history_images if self.history.blocks is None else self.history.blocks.up_to


class Model(Spec):
    """The policy."""

    source: ModelSource = Field(ModelSource(tiny=TinyModel()), description="initial weights; exactly one member")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="number format of engines and of the learner's passes, without it bfloat16 on GPUs and float32 on "
        "CPUs; what is trained is float32",
    )
    freeze_vision: bool = Field(True, description="leave the vision tower as it is")
    lora: Lora | None = Field(None, description="train adapters only; without it all weights")
    min_pixels: Pixels | None = Field(
        None,
        description="pixels of a frame as the model sees it, at least; smaller screens are enlarged. Without it what "
        "the model's image processor says",
    )
    max_pixels: Pixels | None = Field(
        None,
        description="pixels of a frame as the model sees it, at most; larger screens are shrunk. Without it what the "
        "model's image processor allows, or less, so that historyImages frames leave a quarter of the prompt to texts",
    )
    context_tokens: Annotated[int, Field(ge=64, le=1_048_576)] = Field(
        8192, description="prompt and answer together, tokens; visual tokens count"
    )
    adapter: Adapter = Field(Adapter(), description="prompt and action format")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="maxPixels and adapter.maxPixels must not both be set: the latter is the older name",
            cel="!(has(self.maxPixels) && has(self.adapter.maxPixels))",
            holds=lambda o: o.max_pixels is None or o.adapter.max_pixels is None,
        ),
        Rule(
            message="freezeVision must be true with lora: adapters belong to the language model alone",
            cel="!has(self.lora) || self.freezeVision",
            holds=lambda o: o.lora is None or o.freeze_vision,
        ),
        Rule(
            message="minPixels must be <= maxPixels",
            cel="!has(self.minPixels) || !has(self.maxPixels) || self.minPixels <= self.maxPixels",
            holds=lambda o: o.min_pixels is None or o.max_pixels is None or o.min_pixels <= o.max_pixels,
        ),
    )
