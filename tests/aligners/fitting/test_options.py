"""Options out of their range are refused where they are given, by their names."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from tests.tiny import tiny_model

from aligners.callbacks.best import BestPerSite
from aligners.errors import UserError, check_known, check_range
from aligners.finetuning.classifier_training import FinetuningRecipe
from aligners.finetuning.jobs import Variant, parse_variants
from aligners.fitting.alignment import Alignment
from aligners.fitting.bijection.price import BijectionPrice
from aligners.fitting.bijection.recovering import target_states
from aligners.fitting.universe.universe_alignment import UniverseAlignment
from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.stitching.stitching_training import LossWeights, Stitching
from aligners.maps.affine import AffineLayer
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Alignment({"a.b": Linear}), r"letters, digits and underscores.*a\.b"),
        (lambda: Alignment({"items": Linear}), "keeps for itself.*items"),
        (lambda: Alignment(warmup=1.0), r"`warmup`.*1\.0"),
        (lambda: Alignment(rows=0), "`rows`.*0"),
        (lambda: Alignment(most_steps=0), "`most_steps`.*0"),
        (lambda: BestPerSite(patience=0), "`patience`.*0"),
        (lambda: UniverseAlignment(MLP).network(1, [8]), "bijective `network`, but MLP is not"),
        (lambda: InjectionEvaluation([], ["pls"]), r"`closed_form` out of linear, ridge, .*cca.*got pls"),
        (lambda: InjectionEvaluation([]), r"Expected a checkpoint of `train\.py fit`"),
        (lambda: Stitching({"a.b": AffineLayer}), r"letters, digits and underscores.*a\.b"),
        (lambda: Stitching({}), "at least one of `layers`, or `fitted`"),
        (lambda: Stitching(start_batches=-1), "`start_batches` to be at least 1.*got -1"),
        (lambda: Stitching(start_batches=0, loss=LossWeights(activation=1.0)), "`start_batches` to be.*got 0"),
        (lambda: LossWeights(task=-1.0), r"zero or more.*task -1\.0"),
        (lambda: LossWeights(task=0.0), "at least one of them positive.*task 0.0, distillation 0.0, activation 0.0"),
        (lambda: LossWeights(temperature=0.0), r"`loss\.temperature` to be above 0, but got 0\.0"),
        (lambda: BijectionPrice(["mlp", "inns"]), "`maps` out of .* but got inns"),
        (lambda: BijectionPrice(["inn"]), "`maps` to include 'mlp'"),
        (lambda: BijectionPrice(steps=[0, 10]), "`steps`"),
        (lambda: BijectionPrice(steps=[]), "`steps`"),
        (lambda: BijectionPrice(parameters=[0]), "`parameters`"),
        (lambda: BijectionPrice(seeds=0), "`seeds`"),
        (lambda: BijectionPrice(learning_rate=0.0), "`learning_rate`"),
        (lambda: target_states(strengths=[]), "`strengths` to be"),
        (lambda: target_states(strengths=[1.0, 1.0]), "`strengths` to be"),
        (lambda: target_states(targets=0), "`targets` to be"),
        (lambda: target_states(couplings=1), "`couplings` to be"),
        (lambda: FinetuningRecipe(learning_rate=0.0), "`learning_rate` to be above 0, but got 0.0"),
        (lambda: FinetuningRecipe(weight_decay=-0.1), "`weight_decay` to be at least 0"),
        (lambda: FinetuningRecipe(warmup=1.0), "`warmup` to be a whole number of steps, or a share"),
        (lambda: FinetuningRecipe(warmup=-1), "`warmup` to be a whole number of steps, or a share"),
        (lambda: parse_variants([], 3), "at least one of `variants`"),
        (lambda: parse_variants(["bottom"], 3), "`variants` out of none, bottom:4"),
        (lambda: parse_variants(["none:1"], 3), "`variants` out of none, bottom:4.* got 'none:1'"),
        (lambda: parse_variants(["layers:two"], 3), "`variants` out of none, bottom:4"),
        (lambda: parse_variants([""], 3), "`variants` out of none, bottom:4"),
        (lambda: Variant("top", 4).check(tiny_model("bert")), "`top` between 0 and L = 3"),
        (lambda: Variant("layers", 0).check(tiny_model("bert")), "`layers` between 1 and L = 3"),
        (lambda: check_range(least=0, below=1, y=0, x=1), "`x` to be at least 0 and below 1, but got 1."),
        (lambda: check_range(above=0, most=1, y=1, x=math.nan), "`x` to be above 0 and at most 1, but got nan."),
        (lambda: check_range(least=2, z=None, y=[2, 3], x=[2, 1]), r"`x` to be at least 2, but got \[2, 1\]."),
        (lambda: check_known(["a", "b"], z=None, y=["a", "b"], x="c"), "`x` to be one of a, b, but got 'c'"),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()
