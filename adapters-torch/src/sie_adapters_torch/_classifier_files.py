"""What a model folder says about a model that classifies texts, read without torch."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from sie_adapters_torch._files import ModelFiles, limited, read_model
from sie_adapters_torch._labels import check_head, read_labels
from sie_adapters_torch._options import Activation, ClassifierOptions

__all__ = ["ClassifierFiles", "read_classifier"]


@frozen(eq=False)
class ClassifierFiles:
    """A classifier of texts. ``entails``: for a model of natural language inference, the place of the logit that says
    that one text follows from another."""

    model: ModelFiles
    labels: tuple[str, ...]
    activation: Activation
    entails: int | None

    @property
    def contradicts(self) -> int:
        """The place of the logit that is weighed against it: as in transformers, the first one or else the last."""
        return len(self.labels) - 1 if self.entails == 0 else 0


def read_classifier(folder: Path, options: ClassifierOptions, *, weights_needed: bool = True) -> ClassifierFiles:
    """Read a classifier's folder. Raises ModelSourceInvalid, UnsafeSource."""
    model = limited(read_model(folder, options, weights_needed=weights_needed), options.max_length)
    check_head(model, "ForSequenceClassification", adapter="torch-classifier")
    labels = read_labels(model)
    entails = next((index for index, label in enumerate(labels) if label.lower().startswith("entail")), None)
    if len(labels) < 2:
        entails = None
    return ClassifierFiles(model, labels, options.activation or _activation(model, len(labels)), entails)


def _activation(model: ModelFiles, labels: int) -> Activation:
    """As the pipeline of transformers takes it."""
    problem = model.config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"
