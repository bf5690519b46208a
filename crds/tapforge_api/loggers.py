"""Where a run's metrics go besides its own folder. Each needs its library, an extra of the package of the same name."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import Keyed, Path, Rule, Spec, Uri, Word
from .plugin import OPTIONS, PluginOptions

Text = Annotated[str, Field(min_length=1, max_length=256)]


class TensorBoard(Spec):
    """Event files of TensorBoard."""

    directory: Path | None = Field(None, description="folder; without it tensorboard in the run's folder")


class Wandb(Spec):
    """Weights & Biases. The key comes from WANDB_API_KEY."""

    project: Text = Field("tapforge", description="project")
    entity: Text | None = Field(None, description="user or team; without it the key's own")
    group: Text | None = Field(None, description="group of runs")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: files in the run's folder, for `wandb sync`"
    )


class SwanLab(Spec):
    """SwanLab. The key comes from SWANLAB_API_KEY."""

    project: Text = Field("tapforge", description="project")
    workspace: Text | None = Field(None, description="workspace; without it the key's own")
    mode: Literal["cloud", "offline"] = Field(
        "cloud", description="offline: files in the run's folder, for `swanlab sync`"
    )


class MLflow(Spec):
    """MLflow. Credentials come from its own environment variables."""

    tracking_uri: Annotated[Uri, Field()] | None = Field(
        None, description="server or store; without it MLFLOW_TRACKING_URI, else files in the run's folder"
    )
    experiment: Text = Field("tapforge", description="experiment")


class LoggerPlugin(Spec):
    """A logger of another package, by entry point."""

    name: Word = Field(description="entry point of the group tapforge.loggers")
    options: PluginOptions = OPTIONS


class LoggedEpisodes(Spec):
    """Episodes of training as tables with pictures of their screens, in every logger that shows them. Trackers get what
    the phones showed and what the policy answered."""

    per_update: Annotated[int, Field(ge=1, le=64)] = Field(
        4,
        description="episodes of each update: of its groups in order, the first that failed and the first that "
        "succeeded",
    )


class Logging(Spec):
    """Loggers that get every metric of a run; those that are left out are off. One that fails is reported and never
    ends the run."""

    tensorboard: TensorBoard | None = Field(None, description="TensorBoard; write `tensorboard: {}`")
    wandb: Wandb | None = Field(None, description="Weights & Biases")
    swanlab: SwanLab | None = Field(None, description="SwanLab")
    mlflow: MLflow | None = Field(None, description="MLflow")
    plugins: Annotated[tuple[LoggerPlugin, ...], Field(max_length=16), Keyed("name")] = Field(
        (), description="loggers of other packages"
    )
    episodes: LoggedEpisodes | None = Field(
        None, description="episodes with their screens and answers; without it trackers get figures only"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="episodes must be left out without a logger: add tensorboard, wandb, swanlab, mlflow or plugins",
            cel="!has(self.episodes) || has(self.tensorboard) || has(self.wandb) || has(self.swanlab) || "
            "has(self.mlflow) || 0 < size(self.plugins)",
            holds=lambda o: (
                o.episodes is None
                or any(one is not None for one in (o.tensorboard, o.wandb, o.swanlab, o.mlflow))
                or bool(o.plugins)
            ),
        ),
    )
