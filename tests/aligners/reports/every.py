"""A small report of every kind, of any number of sites, with rows that are made up."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from tests.aligners.reports.made import curves, row, scored, stitched

from aligners.finetuning.truncating import MEAN, conditions
from aligners.fitting.training_status import BOTH_WAYS, CLOSED, TRAINED
from aligners.reports.report import Row
from aligners.reports.runs.updates.carrying_report import SCORES

X, Y = "embedded-gpt:0", "embedded-gpt:1"
MAPS = {  # of an evaluation: how it was fitted, and its FVU at the first site
    "permutation": (CLOSED, 1.15), "procrustes": (CLOSED, 0.7), "cca": (CLOSED, 0.6), "linear": (CLOSED, 0.5),
    "mlp": (TRAINED, 0.05), "mlp_paper": (TRAINED, 0.12), "inn": (BOTH_WAYS, 0.08), "inn_paper": (TRAINED, 0.2),
}  # fmt: skip


def retrieved(fvu: float) -> Row:
    """Retrieval of a map: the better, the less it leaves unexplained."""
    return {"top1_all": 0.99 - fvu / 2, "top1_all_centred": 0.99 - fvu / 3, "candidates_all": 9870.0}


def fit(sites: int, x: str = X, y: str = Y) -> list[Row]:
    """All maps both ways, but for one at one site trained."""
    rows = []
    for (name, (fitted, fvu)), site in product(MAPS.items(), range(1, sites + 1)):
        about = {"fit": fitted, "fvu": fvu * (1 + 0.02 * site), "fvu_unseen": 1.4 * fvu, **retrieved(fvu)}
        rows.append(row(x, y, name, "method", (site, site), **about))
        rows.append(row(y, x, name, "method", (site, site), **about))
    rows[-1]["training"] = "untrained start (linear)"
    return rows


def injection(sites: int, x: str = "embedded:0", y: str = "embedded:1") -> list[Row]:
    """A classifier's: ceilings, floors, a mean over draws, and all maps."""

    def answered(accuracy: float, penalty: float) -> Row:
        costs = {"penalty": penalty, "penalty_low": penalty - 0.01, "penalty_high": penalty + 0.01}
        return {**scored(accuracy, 0.02), **costs, "loss": 0.56 + penalty, "agreement": 0.9}

    whole: dict[str, Any] = {"native_x": ("ceiling", 0.73, 0.0), "native_y": ("ceiling", 0.718, 0.0)}
    whole |= {"random_classifier": ("floor", 0.49, 0.11)}
    rows = [row(x, y, name, role, (None, None), **answered(right, cost)) for name, (role, right, cost) in whole.items()]
    rows[-1] |= {"fit": "mean of 20 draws, interval from the least to the largest", "score_low": 0.28}
    rows.append(row(x, y, "random_label", "floor", (None, None), **scored(0.503, 0.02)))
    for site in range(1, sites + 1):
        for name, cost in (("mean", 0.4), ("identity", 0.25)):
            rows.append(row(x, y, name, "floor", (site, site), fvu=4 * cost, **answered(0.6 - cost, cost)))
        for name, (fitted, fvu) in MAPS.items():
            about = {"fit": fitted, "parameters": 16512, "fvu": fvu, "fvu_unseen": 1.5 * fvu, "fvu_inverse": 900 * fvu}
            known = answered(0.72 - 0.02 * fvu, 0.03 * fvu / site) | retrieved(fvu)
            rows.append(row(x, y, name, "method", (site, site), **about, bijective=name == "inn", **known))
    return [one | {"direction": "forward", "n_texts": 1679, "n_rows": 9000} for one in rows]


def bijection(sites: int, x: str = X, y: str = Y) -> list[Row]:
    """All maps in both directions after three numbers of steps, from two seeds."""
    fvus = {"linear": 0.45, "inn_paper": 0.2, "inn_one_way": 0.18, "inn": 0.21, "mlp": 0.2, "free_form": 0.21}
    rows = []
    for (name, fvu), way, steps, seed in product(fvus.items(), ("X to Y", "Y to X"), (150, 500, 2000), (0, 1)):
        worse = 5e4 if name == "inn_one_way" and way == "Y to X" else 1.0
        for site in range(1, sites + 1):
            trained = {"steps": steps, "size": 130_000, "seed": seed} if name != "linear" else {"steps": 0, "size": 0}
            high = worse * fvu * (1 + 0.02 * seed) * (2000 / steps) ** 0.2
            figures = {"fvu": high, "fvu_seen": high, "fvu_unseen": 3 * high, "fvu_other": 2 * high}
            stretch = {"round_trip": 1e-5, "stretch_low": 0.5, "stretch_high": 2.0}
            rows.append(row(x, y, name, "method", (site, site), direction=way) | figures | stretch | trained)
    return rows


def probing(sites: int, x: str = X, y: str = Y) -> dict[str, list[Row]]:
    """Two models with twins, three probes, and codes of one."""
    rows, codes, portions = [], [], []
    probes = {"parts of speech": "edge", "distances": "distance", "depths": "depth"}
    for model, (task, probe) in product((x, y), probes.items()):
        about = {"model": model, "task": task, "probe": probe, "rank": None, "uuas": 0.6, "root_accuracy": 0.5}
        about["n_sentences"] = 1300
        rows.append(
            {**about, "source": "majority", "site": None, "score": 0.3, "control": None, "centre_of_gravity": None}
        )
        for source, site in product(("model", "untrained"), range(sites)):
            score = 0.8 if source == "model" else 0.5
            ends = {f"{name}_{end}": score for name in ("score", "uuas", "root_accuracy") for end in ("low", "high")}
            control = 0.4 if source == "model" and probe == "edge" else None
            known = {"source": source, "site": site, "score": score, "control": control, "centre_of_gravity": None}
            rows.append(about | known | ends | {"selectivity": control and score - control})
    for control, site in product((False, True), range(sites)):
        bits = {"uniform_bits": 5000.0, "frequency_bits": 4000.0, "compression": 2.5 + 0.1 * site}
        kind = {"model": x, "task": "parts of speech", "source": "model", "control": control, "site": site}
        codes.append({**kind, **bits, "compression_low": 2.4, "compression_high": 2.9 + 0.1 * site})
        portions += [{**kind, "share": share, "bits_a_target": 2 - share - 0.1 * site} for share in (0.001, 0.1, 1.0)]
    given = {"model": x, "layer": 1, "words": "the old film moved slowly", "edges": "0-2 1-2 2-3 3-4"}
    trees: list[Row] = [{**given, "counted": given["edges"], "found": "0-1 1-2 2-3 3-4"}]
    return {"rows": rows, "codelengths": codes, "portions": portions, "trees": trees}


def probes_across(sites: int, x: str = X, y: str = Y) -> dict[str, list[Row]]:
    """What a probe reads in Y, in X, through two maps, and a swap of what it reads."""
    rows, twin = [], []
    roles = {"native_y": "ceiling", "native_x": "ceiling", "linear": "method", "inn": "method", "mean": "floor",
             "baseline": "floor"}  # fmt: skip
    for (name, role), site in product(roles.items(), range(1, sites + 1)):
        score = {"ceiling": 0.9, "method": 0.8, "floor": 0.3}[role]
        ends = {"score": score, "score_low": score - 0.02, "score_high": score + 0.02}
        kept = {"kept": 0.9 if role == "method" else 1.0}
        rows.append(row(x, y, name, role, (site, site), task="parts of speech", measure="F1") | ends | kept)
    parts = {"POS": 8, "random": 8, "principal": 8, "whole state": 64}
    for name, (part, k), site in product(("linear", "mean"), parts.items(), range(1, sites + 1)):
        costs = {"part": part, "dimensions": k, "penalty": k / 100, "penalty_low": k / 200, "penalty_high": k / 80}
        twin.append(row(x, y, name, "method", (site, site)) | costs)
    return {"rows": rows, "twin": twin}


def similarity(sites: int, x: str = X, y: str = Y) -> list[Row]:
    """Four measures with all controls over all pairs of layers."""
    rows = []
    for label, features, i, j in product(
        ("linear CKA", "CCA", "SVCCA", "mixed"), ("raw", "standardised"), *[range(sites)] * 2
    ):
        value = 1 / (1 + abs(i - j)) * (0.9 if features == "raw" else 0.8)
        place = {"model_x": x, "model_y": y, "measure": label.split()[0], "label": label, "direction": "both"}
        place["n_rows"] = 9000
        controls = {"low": value - 0.05, "high": value + 0.05, "held_out": value - 0.1, "null": 0.1, "null_high": 0.12,
                    "untrained": 0.3, "ceiling": 0.95}  # fmt: skip
        rows.append(place | {"features": features, "layer_x": i, "layer_y": j, "value": value} | controls)
    return rows


def comparison(sites: int, x: str = X, y: str = Y) -> dict[str, list[Row]]:
    """A change of the last block, with answers, weights, and what differs."""
    rows = []
    for name, site in product(("identity", "permutation", "rotation", "linear"), range(sites)):
        fvu = 1e-13 if site < sites - 1 else 0.02
        ends = {f"{column}{end}": fvu for column in ("fvu", "kl", "penalty") for end in ("", "_low", "_high")}
        rounding = {"floor": 1e-13, "tolerance": 3e-12, "within": site < sites - 1}
        rows.append({"model_x": x, "model_y": y, "site_x": site, "site_y": site, "method": name} | ends | rounding)
    function: Row = {"what": "next tokens", "measure": "KL(old ‖ new), nats", "units": 5000}
    for name in ("difference", "agreement", "loss_old", "loss_new", "loss_change"):
        function |= {f"{name}{end}": 0.25 for end in ("", "_low", "_high")}
    function |= {"tolerance": 1e-12, "same": False, "same_elsewhere": False}
    weights = [{"block": block, "weight": f"blocks.{block}.dense.weight", "difference": 0.3 * (block == sites - 1),
                "tolerance": 1e-7, "changed": block == sites - 1} for block in range(sites)]  # fmt: skip
    at: Row = {"site": sites - 1, "share": 0.31}
    some = {"types": {"type": "film"}, "tokens": {"token": "film", "context": "the old film moved"},
            "texts": {"text": "the old film moved slowly"}}  # fmt: skip
    what: dict[str, list[Row]] = {name: [at | {"times": 4.5, "rows": 20} | words] for name, words in some.items()}
    what["directions"] = [at | {"direction": 1, "texts": "the old film moved slowly | a good film"}]
    return {"rows": rows, "function": [function], "weights": weights, **what}


def compared(sites: int) -> Row:
    """What the meta of a `comparison` says."""
    verdict = {"kind": "changed", "map": "identity", "first": sites - 1, "most": sites - 1, "same_answers": False}
    about = {"precision": "float32", "times": 30.0, "variants": ["another batch"], "not_compared": "", "refusals": {}}
    weights = {"changed": [sites - 1], "blocks": sites - 1}
    return {"verdict": verdict, "weights": weights, "n_texts": 100, **about}


def carrying(sites: int, x: str = X, y: str = Y) -> dict[str, list[Row]]:
    """A head with labels and a dictionary without a prediction, a map at every site."""
    rows, scores, maps = [], [], []
    for name, kind, verdict, value in (("tone", "head", "carry", 0.8), ("sae", "dictionary", "do not use", None)):
        about: Row = {"artefact": name, "kind": kind, "site_x": sites, "site_y": sites}
        said = ("rank_correlation", "fidelity", "agreement", "predicted")
        columns = [side + each for side in ("", "stale_") for each in said]
        told = {f"{each}{end}": value for each in columns for end in ("", "_low", "_high")}
        more = {"rows": "mean", "n_texts": 25, "n_fitted": 100, "map": "ridge", "fitted_on": "tokens", "error": 0.1}
        rows.append({**about, "model_x": x, "model_y": y, **more, "verdict": verdict, "own_score": value, **told})
        maps += [{**about, "site_y": site, "map": each, "fitted_on": "mean", "strength": None, "error": 0.1 * site,
                  "chosen": site == 1} for site in range(1, sites + 1) for each in ("ridge", "linear")]  # fmt: skip
    for place, condition in enumerate(SCORES):
        values = {f"{name}{end}": 0.9 - 0.05 * place for name in ("auroc", "accuracy") for end in ("", "_low", "_high")}
        scores.append({"artefact": "tone", "kind": "head", "condition": condition, "n_texts": 25, **values})
    return {"rows": rows, "scores": scores, "maps": maps}


def surgery(sites: int, x: str = X, y: str = Y) -> list[Row]:
    """Two models and their mean, truncated and skipped in all ways."""
    rows = []
    for model in (x, y, MEAN):
        for number, condition in enumerate(conditions(max(2, sites), base=False, heads=True)):
            score = 0.5 + 0.3 * (number % 11) / 11
            rows.append({"model": model, **vars(condition), **scored(score, 0.03), "loss": 0.5, "n_texts": 25,
                         "score_name": "accuracy"})  # fmt: skip
    return rows


def finetuning(sites: int) -> list[Row]:
    """Two seeds of each number of frozen blocks."""
    variants = ["none", *(f"bottom-{count}" for count in range(1, sites + 1)), "top-1"]
    about = {"trained": 1_234_567, "layers": sites, "n_texts": 20, "score_name": "accuracy", "loss": 0.5}
    rows = []
    for (place, name), seed in product(enumerate(variants), (0, 1)):
        kind, _, count = name.partition("-")
        known = {"variant": name, "kind": kind, "count": int(count or 0), "seed": seed, "seconds": 2.0}
        rows.append({**known, **about, **scored(0.8 - 0.01 * place - 0.02 * seed, 0.01)})
    return rows


def recovery(sites: int, x: str = X) -> list[Row]:
    """Five strengths."""
    return [
        row(x, "target", name, "method", (site, site), strength=strength, fvu=fvu * (strength + 0.01))
        for name, (_, fvu) in MAPS.items() for strength in (0.1, 0.3, 1.0, 2.0, 3.0) for site in range(1, sites + 1)
    ]  # fmt: skip


def steering(sites: int, x: str = X) -> dict[str, list[Row]]:
    """A native direction and a carried one beside two at random, and what is written."""
    rows, equal, written, samples = [], [], [], []
    strengths = {
        "mine": ("native", 1.0),
        "theirs": ("carried", 0.8),
        "random 1": ("random", 0.1),
        "random 2": ("random", -0.1),
    }
    for (name, (role, strength)), site, alpha in product(strengths.items(), range(1, sites + 1), (-0.5, 0.5, 1.0)):
        effect = {
            "words": strength * alpha,
            "words_low": strength * alpha - 0.05,
            "words_high": strength * alpha + 0.05,
        }
        costs = {"kl": alpha**2 / 5, "kl_low": alpha**2 / 6, "kl_high": alpha**2 / 4, "loss": alpha**2 / 8}
        rows.append(
            {"model": x, "n_texts": 200, "method": name, "role": role, "site": site, "alpha": alpha, **effect, **costs}
        )
    for (name, (role, strength)), site in product(strengths.items(), range(1, sites + 1)):
        for level in (0.03, 0.1, 0.3) if name != "random 2" else ():
            about = {"model": x, "method": name.split()[0], "role": role, "site": site, "effect": "words", "kl": level}
            value = None if level == 0.3 else strength * (5 * level) ** 0.5
            ends = {f"{column}{end}": value for column in ("value", "share") for end in ("", "_low", "_high")}
            equal.append(about | ends)
    for name, site in (("own", None), *((name, site) for name in strengths for site in range(1, sites + 1))):
        role = "ceiling" if name == "own" else strengths[name][0]
        about = {"model_x": x, "model_y": x, "method": name, "role": role, "alpha": 0.5, "site_x": site, "site_y": site}
        written.append({**about, "agreement": 0.5, "perplexity": 9.0})
        samples.append({**about, "prompt": "the film is", "continuation": "good , and so it goes on\n"})
    return {"rows": rows, "equal": equal, "generation": written, "samples": samples}


def features(sites: int, x: str = X, y: str = Y) -> dict[str, Any]:
    """Latents of every verdict at each site, by a control and dictionaries of two other seeds."""
    norms = {"shared": 0.5, "undecided": 0.7, "x": 0.02, "y": 0.97}
    rows, of_sites = [], []
    for site in range(1, sites + 1):
        about = {"model_x": x, "model_y": y, "site_x": site, "site_y": site}
        for latent, (verdict, norm) in enumerate(norms.items()):
            nu = 0.05 if verdict in ("x", "y") else 0.9
            ratios = {"nu_error": nu, "nu_error_low": nu - 0.04, "nu_error_high": nu + 0.04}
            ratios |= {"nu_rebuilt": nu / 2, "nu_rebuilt_low": 0.0, "nu_rebuilt_high": nu}
            known = {"norm": norm, "p_own": 0.01, "p_shared": 0.9, "rank_own": 0.002, "fired": 0.03, "units": 90}
            shares = {"variance_x": 0.01 * latent, "variance_y": 0.02}
            rows.append(about | {"latent": latent, "verdict": verdict, **known, **shares, **ratios, "seeds": 1})
        counts = {"n_texts": 600, "latents": 128, "live": 120, "shared": 90, "x": 3, "y": 4, "undecided": 23, "dead": 8}
        norms_say = {"own_by_norm": 30, "own_by_norm_alone": 24}
        of_sites.append(about | counts | norms_say | {"fvu_x": 0.2, "fvu_y": 0.25})
    return {"rows": rows, "sites": of_sites}


FEATURES_META: Row = {"false_own": 1.2, "error_rate": 0.17, "seeds": 2}


def universe(sites: int, names: Sequence[str] = (X, Y, "embedded-gpt:2")) -> dict[str, list[Row]]:
    """The network and two others for three models, and the directions of its space."""
    trips = {"round_trip": 1e-5, "cycle": 0.1, "parameters": 99_000}
    rows = [
        row(x, y, name, "method", (site, site), fvu=fvu, fvu_unseen=2 * fvu, **trips, **retrieved(fvu))
        for name, fvu in (("universe", 0.2), ("procrustes", 1.5), ("pairwise_inn", 0.18))
        for x, y in product(names, names) if x != y for site in range(1, sites + 1)
    ]  # fmt: skip
    spread = [{"site": site, "direction": place, "variance": 3 / place, **dict.fromkeys(names, 1 / place)}
              for site in range(1, sites + 1) for place in range(1, 9)]  # fmt: skip
    types = [{"site": 1, "type": name, "rows": 9, "fvu": 0.9, "times": 4.5} for name in ("of", '"')]
    return {"rows": rows, "directions": spread, "types": types}


def migration(queries: int = 300) -> Row:
    """Two maps both ways on two numbers of pairs, in two domains, of which one is held out."""

    def measured(**about: Any) -> Row:
        row = {"route": None, "map": None, "pairs": None, "queries": queries, "neighbours_kept": None, "chosen": None}
        value = about.pop("value")
        for name in ("recall1", "recall10", "ndcg10"):
            for beginning, scale in (("", 0.8), ("relative_", 1.0)):
                for end, away in (("", 0.0), ("_low", -0.02), ("_high", 0.02)):
                    row[f"{beginning}{name}{end}"] = scale * (value + away)
        return row | about

    rows, forecasts = [], []
    for domain in ("all", "reviews", "sentences"):
        held = {"domain": domain, "held_out": domain == "sentences"}
        for name, value in {"re-embedded": 1.0, "old model": 0.9, "as it is": 0.1}.items():
            rows.append(measured(map=name, value=value, **held))
        for route, pairs, name in product(("queries", "documents"), (500, 2000), ("procrustes", "ridge")):
            value = 0.9 + 0.02 * (name == "ridge") + 0.01 * (pairs > 500) - 0.05 * held["held_out"]
            about = {"route": route, "pairs": pairs, "map": name, "chosen": name == "ridge", "neighbours_kept": value}
            rows.append(measured(value=value, **about, **held))
    for route, pairs in product(("queries", "documents"), (500, 2000)):
        row = {"route": route, "pairs": pairs, "map": "ridge", "pool": 300, "index": 1000}
        for name in ("recall1", "recall10", "ndcg10"):
            for end, away in (("", 0.0), ("_low", -0.03), ("_high", 0.03)):
                row[f"predicted_{name}{end}"] = 0.91 + away
                row[f"relative_{name}{end}"] = 0.92 + away
        forecasts.append(row)
    sides = {
        "old": {"place": "models/old", "texts_a_second": 80.0, "width": 384},
        "new": {"place": "models/new", "texts_a_second": 40.0, "width": 768, "assumed": ["It has no modules.json."]},
    }
    meta = sides | {
        "same_family": False, "least_recall": 0.9, "judged": True, "similarity": "cosine", "pairs": 2000,
        "validation": 300, "queries": queries, "documents": 1000, "held_out_domains": ["sentences"],
        "domains": ["reviews", "sentences"], "index_size": 10**6, "hours": 6.9, "price_per_hour": 2.0, "price": 13.9,
        "seed": 0, "cautions": [],
    }  # fmt: skip
    return {"rows": rows, "forecasts": forecasts, "meta": meta}


def every_kind(sites: int, **names: str) -> dict[str, Any]:
    """Kind of report -> its rows, or its rows and further tables; `x` and `y` name other models."""
    far = list(names.values()) or [X, Y]
    return {
        "attention": fit(sites, **names),
        "bijection": bijection(sites, **names),
        "carrying": carrying(sites, **names),
        "comparison": comparison(sites, **names),
        "features": features(sites, **names),
        "finetuning": finetuning(sites),
        "fit": fit(sites, **names),
        "injection": injection(sites, **names),
        "migration": migration(),
        "probes_across": probes_across(sites, **names),
        "probing": probing(sites, **names),
        "recovery": recovery(sites),
        "similarity": {"rows": similarity(sites, **names), "layers": [], "distances": []},
        "steering": steering(sites, far[0]),
        "stitching": (lambda rows: {"rows": rows, "curves": curves(rows)})(stitched(far, range(1, sites + 1))),
        "surgery": surgery(sites, **names),
        "universe": universe(sites, [*far, "embedded-gpt:2"]),
    }
