"""What the tutorials conclude from their numbers holds for the numbers that stand beside it on the page."""

from collections.abc import Callable
from itertools import combinations

import pytest
from tests.tutorials.scripts import TUTORIALS, printed, words

Numbers = dict[str, list[float]]


def lowered(rows: Numbers, name: str) -> float:
    """The share of the penalty of the states as they are that a map removes."""
    return 1 - rows[name][1] / rows["identity"][1]


def penalties(rows: Numbers, route: str, method: str) -> list[float]:
    """Of each block, without the intervals."""
    return rows[f"{route} {method}"][::3]


def apart(rows: Numbers, low: str, high: str) -> bool:
    """Whether the intervals of one row are below those of another."""
    return all(a < b for a, b in zip(rows[low][2::3], rows[high][1::3], strict=True))


ALIGN, SEEDS = ("permutation", "procrustes", "linear", "inn"), ("permutation", "procrustes", "linear")
NETWORKS = ("mlp", "inn")
BOTH = ("GELU → SoLU", "SoLU → GELU")
COUNTS = ("32", "64", "128", "256", "512", "1024", "2048")

# The sentences below "What one sees" and what has to hold for them. The rows are those that the page prints.
CLAIMS: dict[str, dict[str, Callable[[Numbers], bool]]] = {
    "align_two_models": {
        "Put in as they are (`identity`), the states of the first model raise the loss of the second by more than 3 "
        "nats a token.": lambda rows: rows["identity"][1] > 3,
        "Every map lowers that penalty.": lambda rows: all(lowered(rows, name) > 0 for name in ALIGN),
        "A one-to-one matching of neurons removes more than half of it, a rotation or a linear map nine tenths, and "
        "the invertible network 98 %.": lambda rows: (
            lowered(rows, "permutation") > 0.5
            and all(0.88 < lowered(rows, name) < 0.93 for name in ("procrustes", "linear"))
            and 0.975 < lowered(rows, "inn") < 0.9899
        ),
        "The order by FVU and the order by penalty are the same, but the distances are not.": lambda rows: (
            sorted(ALIGN, key=lambda name: rows[name][0]) == sorted(ALIGN, key=lambda name: rows[name][1])
        ),
        "The linear map has an FVU that is more than two fifths below that of the rotation, and a penalty that is "
        "less than a fifth below: not all that varies in a state matters to the blocks above.": lambda rows: (
            rows["linear"][0] < 0.6 * rows["procrustes"][0]
            and 0.8 * rows["procrustes"][1] < rows["linear"][1] < rows["procrustes"][1]
        ),
    },
    "bijection_or_lookup_table": {
        "On types that it has met, the lookup table leaves less than 3 % of the variance unexplained, less than any "
        "map.": lambda rows: (
            rows["lookup table"][0] < 0.03
            and all(rows["lookup table"][0] < rows[name][0] for name in ("linear", *NETWORKS))
        ),
        "On unseen types its FVU is 1, because it gives the mean of Y there.": lambda rows: (
            rows["lookup table"][1] == 1
        ),
        "On seen types, both networks leave less than a third of what the linear map leaves.": lambda rows: all(
            3 * rows[name][0] < rows["linear"][0] for name in NETWORKS
        ),
        "On unseen types, they leave as much as the linear map or more.": lambda rows: all(
            rows[name][1] > 0.99 * rows["linear"][1] for name in NETWORKS
        ),
        "The FVU of the linear map is a third higher on unseen types than on seen ones.": lambda rows: (
            1.25 < rows["linear"][1] / rows["linear"][0] < 1.42
        ),
        "The FVU of the networks is more than four times as high: most of their lead is memorised "
        "words.": lambda rows: all(rows[name][1] > 4 * rows[name][0] for name in NETWORKS),
    },
    "is_cka_enough": {
        "Left: the fewer the rows, the higher the CKA of noise.": lambda rows: (
            [rows[count][1] for count in COUNTS] == sorted((rows[count][1] for count in COUNTS), reverse=True)
        ),
        "It is .88 with 32 rows and still .11 with 2048.": lambda rows: (
            (rows["32"][1], rows["2048"][1]) == (0.88, 0.11)
        ),
        "The unbiased estimate stays within .05 of zero, and may be negative.": lambda rows: all(
            abs(rows[count][2]) < 0.05 for count in COUNTS
        ),
        "Middle: one shared dimension of 8 standard deviations brings the CKA of unrelated states above .9.": (
            lambda rows: rows["0"][1] == 0 and rows["8"][1] > 0.9
        ),
        "Standardised, they stay at zero.": lambda rows: all(
            abs(rows[size][-1]) < 0.01 for size in ("0", "2", "4", "8", "16", "32")
        ),
        "Right: with rows shuffled, CKA is zero at every layer, so chance plays no part.": lambda rows: (
            not any(rows["rows shuffled"])
        ),
        "The trained models are above .8 and the untrained ones between .2 and .3.": lambda rows: (
            min(rows["trained"]) > 0.8 and all(0.2 < value < 0.3 for value in rows["untrained"])
        ),
        "So some of the similarity comes from the words that both models read, and most of it from training.": (
            lambda rows: all(2 * b < a for a, b in zip(rows["trained"], rows["untrained"], strict=True))
        ),
    },
    "stitch_gelu_into_solu": {
        "A model stitched to itself without a layer has a penalty of exactly 0: its own states are put "
        "back.": lambda rows: not any(rows["GELU → GELU identity"] + rows["SoLU → SoLU identity"]),
        "Between the two models, states put in as they are have a penalty above 3 nats a token (left).": lambda rows: (
            min(penalty for route in BOTH for penalty in penalties(rows, route, "identity")) > 3
        ),
        "One trained affine layer brings it below .25 (right: note the scale).": lambda rows: (
            max(penalty for route in BOTH for penalty in penalties(rows, route, "affine")) < 0.25
        ),
        "SoLU into GELU has a lower penalty than GELU into SoLU after every block, and the intervals of the two "
        "directions do not overlap.": lambda rows: apart(rows, "SoLU → GELU affine", "GELU → SoLU affine"),
    },
    "my_model_was_updated": {
        "Of the old model beside itself the verdict is that nothing differs beyond rounding, and of the new one that "
        "it is different: no permutation or rotation makes even the first states agree.": lambda rows: (
            {"the same model: rounding, answers the same", "the new model: different, answers others"} <= set(rows)
        ),
        "Put on the new model as it is, the head is at chance.": lambda rows: abs(rows["stale AUROC"][0] - 0.5) < 0.03,
        "Carried without a label, it is within .01 of what it was on the old model, and within .03 of one that was "
        "trained anew.": lambda rows: (
            abs(rows["carried AUROC"][0] - rows["on the old AUROC"][0]) < 0.01
            and abs(rows["carried AUROC"][0] - rows["trained anew AUROC"][0]) < 0.03
        ),
        "The direction lowers the log-odds of good words instead of raising them: what tells good reviews from bad "
        "ones is not what makes a good word come next.": lambda rows: rows["native log-odds"][0] < 0,
        "At equal cost the carried direction has more than half of the effect of the native one, and random ones have "
        "less than a quarter.": lambda rows: (
            rows["carried log-odds"][0] < rows["native log-odds"][0] / 2
            and abs(rows["random log-odds"][0]) < abs(rows["native log-odds"][0]) / 4
        ),
    },
    "many_seeds_at_once": {
        "On average over pairs, the linear map leaves about .2 of the variance, the rotation .36, and the matching of "
        "neurons 1.1, which is worse than the mean of Y.": lambda rows: all(
            abs(mean - value) < 0.05
            for name, value in {"linear": 0.2, "procrustes": 0.36, "permutation": 1.1}.items()
            for mean in rows[name][::2]
        ),
        "After every block, the means of any two maps are more than six standard deviations apart, so the order of the "
        "maps does not depend on which two seeds one picks.": lambda rows: all(
            abs(rows[a][block] - rows[b][block]) > 6 * max(rows[a][block + 1], rows[b][block + 1])
            for a, b in combinations(SEEDS, 2)
            for block in (0, 2, 4)
        ),
        "From block to block, the mean of each map changes by less than one standard deviation.": lambda rows: all(
            max(rows[name][::2]) - min(rows[name][::2]) < min(rows[name][1::2]) for name in SEEDS
        ),
    },
}


@pytest.mark.parametrize("name", TUTORIALS)
def test_every_conclusion_is_one_of_the_claims(name: str) -> None:
    assert words(name, "What one sees") == list(CLAIMS[name])


@pytest.mark.parametrize(("name", "claim"), [(name, claim) for name in CLAIMS for claim in CLAIMS[name]])
def test_the_numbers_on_the_page_say_so(name: str, claim: str) -> None:
    assert CLAIMS[name][claim](printed(name)), printed(name)
