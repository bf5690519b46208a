"""What `tapforge cluster submit` refuses without asking a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapforge_api import load
from tapforge_api.base import POD_TEMPLATES_ANNOTATION
from tapforge_trainer.remote import ClusterError
from tapforge_trainer.remote.submit import read
from tapforge_trainer.run.folder import SPEC, write_spec

FILE = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: quick}
spec:
  cluster: {image: trainer}
"""


def test_the_file_that_a_run_of_a_cluster_left_in_its_folder_is_not_submitted_again(tmp_path: Path) -> None:
    """It would get Pods without GPUs: the GPUs of its Pods are counted in it, and the Pods' templates left out."""
    run = load(FILE)
    write_spec(tmp_path, run)
    assert read(tmp_path / SPEC, (), None, "lab")[0].metadata.name == "quick"
    annotated = f"metadata: {{name: quick, annotations: {{{POD_TEMPLATES_ANNOTATION}: '0'}}}}"
    write_spec(tmp_path, load(FILE.replace("metadata: {name: quick}", annotated)))
    with pytest.raises(ClusterError, match="submit the file that you wrote"):
        read(tmp_path / SPEC, (), None, "lab")
