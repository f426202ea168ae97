"""The LightningDataModule of texts for whole models, which it does not run, and the options that users can set."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.far_marks import FarMarks
from aligners.datamodules.frozen_models import with_revisions
from aligners.datamodules.module import WITHOUT_GRADIENTS, TextModule, splits_of_stage
from aligners.datamodules.rows.policies import RowKind, check_component
from aligners.datamodules.rows.sites import route_sites
from aligners.datamodules.task_targets import TaskBatch, check_mask, task_batch
from aligners.datamodules.text.annotated.sentence import (
    ANNOTATION,
    ANSWERS,
    CHOICE,
    Sentence,
)
from aligners.datamodules.text.labels import LabelsOption, check_labelled
from aligners.datamodules.text.texts import FittedTexts
from aligners.datamodules.tokens.splits import Split
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.errors import UserError, check_range
from aligners.models.architectures import Component, Task
from aligners.models.classifiers import new_classifier
from aligners.models.model import FrozenModel
from aligners.models.model_identity import code_not_run

SPLITS: tuple[Split, ...] = ("fit", "validation", "test")
STITCHES_TOKENS = (
    "Stitching puts the state of a token in place of another model's state of the same token",
    "At each position the models would read different pieces of text: choose models of one tokenizer",
)


class ModelTexts(TextModule):
    """Turns text into batches for whole models. It does not run them.

    Where sites are named, a batch is a `TaskBatch`, with the targets of the last model's head; otherwise a `TextBatch`,
    all of whose texts have labels.

    Args:
        chosen: the options that the user set, by name, for `config`.
        one_tokenizer: see `TextModule`.
        options: options of `TextModule` and `FrozenModels`, by their names.
    """

    def __init__(
        self,
        chosen: dict[str, Any],
        one_tokenizer: tuple[str, str] | None,
        **options: Any,
    ) -> None:
        self.chosen = chosen
        self.models: list[str] = chosen["models"]
        self.revisions: list[str | None] | None = chosen["revisions"]
        self.bases: list[str] = chosen.get("bases", [])
        self.labels: LabelsOption = chosen.get("labels")
        self.sites: Any = chosen.get("sites")
        self.masked_share: float = chosen.get("masked_share", 0.15)
        self.component: Component = chosen.get("component", "residual")
        named = with_revisions(self.models, self.revisions)
        super().__init__(named, False, one_tokenizer, **options)

    def config(self) -> dict[str, Any]:
        """Return the options as plain values, from which an equal data module can be made."""
        config = {**self.chosen, **super().config()}
        if self.sites is None:
            config.pop("packed")  # not a user's option
        return config

    def describe(self) -> dict[str, Any]:
        """Describe texts and models for a report, as plain values."""
        described = self.identities()
        if self.sites is None:
            count = len(self.models)
            bases = {"bases": described[count:], "component": "residual"}
            return {"models": described[:count], **bases, **super().describe()}
        about: dict[str, Any] = {"models": described}
        if self.task == "masked":
            about["masked_share"] = self.masked_share
        rows = {"component": self.component, "rows": "tokens", "special_tokens": True}
        return {**about, **rows, **super().describe()}

    # ------------------------------------------------------------------ sites and tasks

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """The sites of each model, as the source or the target of any route."""
        chosen: dict[int, set[int]] = defaultdict(set)
        for a, b in combinations(range(len(depths)), 2):
            if self.sites is not None:
                for i, j in route_sites(self.sites, depths, a, b, self.component):
                    chosen[a].add(i)
                    chosen[b].add(j)
        return [sorted(chosen[number]) for number in range(len(depths))]

    @property
    def storable(self) -> bool:  # type: ignore[override]
        """Whether states come from a store, if there is one. Not of masked texts, whose states differ by epoch."""
        return self.task != "masked"

    def check_models(self) -> None:
        """Load the models, with every check that can be made before a batch is read."""
        for model, sites in zip(self.frozen, self.wanted_sites(), strict=True):
            for site in sites:
                model.check_site(site, "sites", self.component)
        check_mask(self.frozen[-1])

    @property
    def task(self) -> Task | None:
        """The task of the last model's head."""
        return self.frozen[-1].task

    def prepare(self, texts: TextBatch, epoch: int = 0) -> TaskBatch:
        """Add to a batch, on the CPU, its rows and the targets of the last model's task; see `task_batch`."""
        return task_batch(
            texts,
            self.frozen[-1],
            masked_share=self.masked_share,
            seed=self.seed,
            epoch=epoch,
        )

    # ------------------------------------------------------------------ classifiers and their answers

    def under_heads(self, tuned: FrozenModel) -> list[FrozenModel]:
        """Load the `bases`, each under a new head with as many classes as the given model has."""
        if tuned.n_labels is None:
            raise UserError(
                f"Expected `models` to be classifiers where `bases` are named, but {tuned.name} "
                f"{tuned.unasked or 'has no classification head'}. Name models that were fine-tuned to classify."
            )
        bases = []
        for name in self.bases:
            model, tokenizer = self.classifier(
                name, tuned.n_labels, self.seed, dtype=self.frozen_models.dtype
            )
            bases.append(FrozenModel(model, tokenizer, name=name))
        return bases

    def classifier(
        self, name: str, n_labels: int, seed: int, **options: Any
    ) -> tuple[Any, Any]:
        """Load a model under a new classification head, and its tokenizer, with this module's options.

        Args:
            name: name of the model.
            n_labels: number of classes of the head; 1: it predicts a number.
            seed: seed of the head.
            options: further options of `aligners.models.classifiers.new_classifier`.
        """
        models = self.frozen_models
        options.setdefault("attn_implementation", models.attn_implementation)
        options.setdefault("trust_remote_code", models.trust_remote_code)
        model, tokenizer = new_classifier(models.path(name), n_labels, seed, **options)
        for sentence in code_not_run(model, tokenizer, name):
            self.caution(sentence)
        return model, tokenizer

    def trained_on(self, base: str) -> FittedTexts:
        """Return the record of texts to save with a classifier trained from `base`: its own texts and those of `base`.

        Validation texts are not recorded: they choose nothing.
        """
        return self.texts.fitted("fit") | self.frozen_models.fitted_on().get(base)

    @property
    def targets(self) -> Literal["labels", "choices", "spans", "trees"]:
        """What is learned from a text: a label, which answer is right or, without labels, answer spans or a tree."""
        fit = self.texts.fit
        columns = self.texts.fit.column_names
        if CHOICE in columns and self.sites is None:
            return "choices"
        if "label" in columns:
            return "labels"
        if ANSWERS in columns:
            return "spans"
        if ANNOTATION in columns:
            for annotation in fit[ANNOTATION]:
                if Sentence.of("", annotation).heads:
                    return "trees"
        return "labels"

    def split(self, name: Split) -> TokenisedTexts:
        """Tokenise a split for all models; question by question where one of several answers is to be chosen."""
        texts = super().split(name)
        if self.targets == "choices":
            return texts.by_question
        return texts

    def answers(self, split: Split) -> Tensor:
        """Return the class of each text of a split, (n,) int64, or the number to predict, (n,) float32.

        For questions with several answers, return the place of the right one, (questions,) int64.

        Raises:
            ValueError: some texts have none.
        """
        who = f"A classifier that reads {split} texts"
        columns = self.texts.columns_without_labels
        labels = self.split(split).labels
        return check_labelled(labels, who, self.text.source, columns=columns)

    @property
    def classes(self) -> int:
        """Return C, the number of classes of a head to train on the texts; 1 for numbers, and for answers to questions.

        Raises:
            ValueError: as in `answers`, `Texts.classes_to_learn` and `Texts.check_numbers`.
        """
        if self.texts.regression:
            self.texts.check_numbers()
            return 1
        for split in SPLITS:
            self.answers(split)
        if self.targets == "choices":
            return 1
        return self.texts.classes_to_learn

    def constant_answers(self) -> Tensor:
        """Return the best answer that ignores the text, for each held-out text, (n,); see `Texts.constant_label`."""
        constant = self.texts.constant_label(regression=self.texts.regression)
        if self.targets == "choices":
            constant = float(self.answers("fit").bincount().argmax())
        count = len(self.answers("test"))
        return torch.full((count,), constant, dtype=torch.float64)

    # ------------------------------------------------------------------ Lightning's hooks

    def setup(self, stage: str) -> None:
        """Load the texts and, where sites are named, the models, with every check that can be made before reading."""
        if self.sites is not None:
            super().setup(stage)
            return
        if self.targets in ("labels", "choices"):
            for split in splits_of_stage(stage):
                self.answers(split)

    def train_dataloader(self) -> DataLoader:
        """Load the fitting texts, in an order that follows from `order` and the epoch."""
        self._note_far("fit")
        return self.resumable(self.loader("fit", shuffle=True))

    def test_dataloader(self) -> list[DataLoader]:
        """Load the texts of `splits`."""
        self._note_far(self.splits[0])
        return super().test_dataloader()

    def _note_far(self, split: Split) -> None:
        """Warn of far rows where sites are named. This reads some texts, so it comes after every check."""
        if self.sites is not None:
            become = "They count like any other row: every token's state is replaced, and training sees only the loss"
            FarMarks(self).note(split, RowKind("tokens"), become)

    def val_dataloader(self) -> DataLoader:
        """Load the validation texts."""
        return self.loader("validation", batch_size=WITHOUT_GRADIENTS * self.batch_size)

    def on_before_batch_transfer(
        self, batch: Any, dataloader_idx: int
    ) -> TextBatch | TaskBatch:
        """Choose rows and masks while the batch is still on the CPU."""
        if self.sites is None:
            return batch
        epoch = 0
        if self.trainer is not None and self.trainer.training:
            epoch = self.trainer.current_epoch + 1
        return self.prepare(batch, epoch)


def stitched_texts(
    models: list[str] = ["embedded:0", "embedded:1"],  # noqa: B006  (copied)
    sites: str | list[str | int] = "blocks",
    masked_share: float = 0.15,
    revisions: list[str | None] | None = None,
    labels: LabelsOption = None,
    component: Component = "residual",
    **options: Any,
) -> ModelTexts:
    """Texts for two or more frozen models that share a tokenizer, which are stitched together at sites.

    Args:
        models: Hub ids, local folders, or embedded models such as `embedded:0` and `embedded-gpt:0:activation=solu`.
        sites: where a state is read and where it is put: `blocks` (1..L), `all` (0..L), `grid` (every block with every
            block), or layers and pairs: `1,3:5` is site 1 of both models, and site 3 of the earlier model in `models`
            with site 5 of the later one.
        masked_share: share of the tokens that a masked language model must predict.
        revisions: revision of each model on the Hub; default: the main one.
        labels: which classes of a head stand for each class of the texts, where their names differ, by number or name:
            {"entailment": 0, "not_entailment": [1, 2]}. Where several are given, their probabilities are added. Give
            one map, or a list with one for each model.
        component: what is read and replaced at a site: `residual`, the stream between the blocks; `attention` or `mlp`,
            what that sub-layer of the block adds to the stream.
        options: options of `TextModule` and `FrozenModels`, by their names. `seed` also draws the masks.

    Raises:
        ValueError: an option is out of its range, or fewer than two models are named.
    """
    check_component(component)
    if len(models) < 2:
        raise UserError(
            f"Expected `models` to name at least two models, but got {models}. The same name twice is allowed: "
            "a model and itself."
        )
    check_range(above=0, below=1, masked_share=masked_share)
    chosen = {
        "models": models,
        "sites": sites,
        "masked_share": masked_share,
        "revisions": revisions,
        "labels": labels,
        "component": component,
    }
    return ModelTexts(chosen, STITCHES_TOKENS, **options)


def steered_texts(
    model: str = "embedded-gpt:0", revision: str | None = None, **options: Any
) -> ModelTexts:
    """Texts for a language model that is steered.

    Args:
        model: a Hub id, a local folder, or an embedded model such as `embedded-gpt:0`.
        revision: revision of the model on the Hub; default: the main one.
        options: options of `TextModule` and `FrozenModels`, by their names.

    Raises:
        ValueError: an option is out of its range.
    """
    chosen = {"models": [model], "revisions": [revision], "sites": []}
    return ModelTexts(chosen, None, **options)


def labelled_texts(
    models: list[str] | str = "embedded:0",
    bases: list[str] | str | None = None,
    revisions: list[str | None] | None = None,
    labels: LabelsOption = None,
    **options: Any,
) -> ModelTexts:
    """Load labelled texts for one or more models with any tokenizers, to fine-tune classifiers or for surgery.

    Args:
        models: Hub ids, local folders, or embedded models such as `embedded:0`.
        bases: models from which `models` were fine-tuned. They come after the others, each under a new classification
            head that `seed` draws.
        revisions: revision of each of `models` on the Hub; default: the main one.
        labels: which classes of a head stand for each class of the texts, where their names differ, by number or name:
            {"entailment": 0, "not_entailment": [1, 2]}. Where several are given, their probabilities are added. Give
            one map, or a list with one for each model.
        options: options of `TextModule` and `FrozenModels`, by their names, without `packed`, `devices`, `device_map`,
            `store` and its options. `seed` also draws the bases' heads; `reorder` gives the order of the texts
            another seed.

    Raises:
        ValueError: an option is out of its range, or no model is named.
    """
    chosen = {
        "models": _listed(models),
        "bases": _listed(bases or []),
        "revisions": revisions,
        "labels": labels,
    }
    # By name, so that the command line does not offer what is set here.
    return ModelTexts(
        chosen,
        None,
        packed=False,
        devices=None,
        device_map=None,
        store=None,
        store_dtype=None,
        store_rows="tokens",
        **options,
    )


def _listed(names: list[str] | str) -> list[str]:
    if isinstance(names, str):
        return [names]
    return list(names)
