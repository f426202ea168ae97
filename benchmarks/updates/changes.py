"""How often `evaluate.py compare` is wrong: pairs in which nothing has changed, and models of which one block has.

    python -m benchmarks.updates.changes REAL --half judged --json FILE

The folder has `models` and `data` as `benchmarks/real/models.py` makes them. Unchanged pairs are a model and itself:
reloaded, run in other batches, with another attention or in float64; stored in bfloat16, float16 or int8; with states
rotated or permuted, with hidden units permuted, with heads turned. An alarm is a verdict that anything has changed.
Edits change one block: a rank-one edit of a matrix at three strengths, relative to its spectral norm; three to five
steps of training; a direction that one unit writes on some tokens. An edit is found if the verdict names its block.
Beside every verdict stands that of the weights, entry by entry.

The half `unexcited` is apart: the embedding of a token changes that no text has, which only the weights can show.

Tolerances were set on the half `development` (other models, seeds and texts) before the half `judged` was run, once.
"""

import copy
import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a bare checkout

from aligners.api import compare, load
from aligners.injection.comparing.comparison import Compared
from aligners.injection.comparing.precision import INT8, rounded, with_weights
from aligners.injection.comparing.verdict import TIMES
from aligners.models.architectures import Component
from aligners.models.loading.model_files import quiet
from aligners.models.model import FrozenModel, Inputs
from benchmarks.harness import machine, parser, write_whole
from benchmarks.updates.updated import (
    Planted,
    block_list,
    fine_tune,
    permute_residual,
    permute_units,
    plant,
    rank_one,
    rotate,
    turn_heads,
)

STRENGTHS = (0.1, 0.03, 0.01)
FINE = {
    "rounding": "unchanged",
    "coordinates": "unchanged",
}  # verdicts that are no alarm


class InParts(FrozenModel):
    """A model that reads and answers a batch some texts at a time, the last ones first."""

    size = 1

    def front(
        self, inputs: Inputs, sites: Sequence[int], component: Component = "residual"
    ) -> list[Tensor]:
        """See `FrozenModel.front`."""
        ids, mask, whole = inputs["input_ids"], inputs["attention_mask"], list[Tensor]()
        for part in torch.arange(len(ids)).flip(0).split(self.size):
            columns = mask[part].any(0).nonzero()[:, 0]
            states = super().front(
                {name: value[part][:, columns] for name, value in inputs.items()},
                sites,
                component,
            )
            whole = whole or [
                state.new_zeros(*ids.shape, state.shape[-1]) for state in states
            ]
            for all_texts, state in zip(whole, states, strict=True):
                all_texts[part[:, None], columns] = state
        return whole


@dataclass
class Base:
    """A model of the benchmark: its name, how it is loaded, and how many cases of each kind it has."""

    name: str
    width: int
    load: Callable[[], FrozenModel]
    unchanged: int
    edits: int
    labelled: bool = False
    both: int = 2  # edits in other coordinates
    model: FrozenModel = field(init=False)

    @property
    def family(self) -> str:
        """Of the model."""
        return str(self.model.config.model_type)


def lower(kind: Any, folder: Path, blocks: int, **options: Any) -> FrozenModel:
    """The lower blocks of a model, in float32."""
    with quiet():
        model = kind.from_pretrained(folder, dtype=torch.float32, **options)
    del block_list(model)[blocks:]
    model.config.num_hidden_layers = blocks
    return FrozenModel(
        model,
        AutoTokenizer.from_pretrained(folder),
        name=f"{folder.name}, {blocks} blocks",
    )


def bases(models: Path, half: str) -> list[Base]:
    """The models of a half."""
    encoder, language = (
        partial(lower, AutoModel, add_pooling_layer=False),
        partial(lower, AutoModelForCausalLM),
    )
    if half == "unexcited":
        return [
            Base(
                "embedded:1",
                64,
                partial(load, "embedded:1"),
                0,
                10,
                labelled=True,
                both=0,
            )
        ]
    if half == "development":
        return [
            Base("embedded-gpt:0", 64, partial(load, "embedded-gpt:0"), 14, 9),
            Base("embedded:0", 64, partial(load, "embedded:0"), 14, 9, labelled=True),
            Base("minilm", 384, partial(encoder, models / "minilm", 6), 12, 8),
            Base("mpnet", 768, partial(encoder, models / "mpnet", 3), 8, 4),
        ]
    return [
        Base("embedded-gpt:1", 64, partial(load, "embedded-gpt:1"), 30, 18, both=4),
        Base(
            "embedded:1", 64, partial(load, "embedded:1"), 30, 18, labelled=True, both=4
        ),
        Base("e5", 384, partial(encoder, models / "e5", 6), 18, 12),
        Base("mpnet", 768, partial(encoder, models / "mpnet", 4), 10, 5, both=1),
        Base("smollm2", 576, partial(language, models / "smollm2", 6), 12, 7),
    ]


def derived(
    base: FrozenModel, change: Callable[[PreTrainedModel], object], name: str
) -> tuple[FrozenModel, Any]:
    """A copy of a model that was changed in place, and what the change returned."""
    copied = copy.deepcopy(base.model)
    given = change(copied)
    return FrozenModel(copied, base.tokenizer, name=name), given


def unchanged(base: Base) -> Iterator[tuple[str, str, FrozenModel]]:
    """Kind, variant and model of pairs in which nothing has changed, as many as the base asks for."""
    model = base.model
    yield "reloaded", "", base.load()
    for size in (1, 3):
        parts = InParts(copy.deepcopy(model.model), model.tokenizer, name="in parts")
        parts.size = size
        yield "rebatched", f"{size} texts at once", parts
    eager = copy.deepcopy(model.model)
    eager.set_attn_implementation("eager")
    yield (
        "computed otherwise",
        "eager attention",
        FrozenModel(eager, model.tokenizer, name="eager"),
    )
    double = copy.deepcopy(model.model).double()
    yield (
        "computed otherwise",
        "float64",
        FrozenModel(double, model.tokenizer, name="double"),
    )
    for precision in ("bfloat16", "float16", INT8):

        def round_weight(_: Any, weight: Tensor, precision: str = precision) -> Tensor:
            return rounded(weight, precision)

        yield "rounded", precision, with_weights(model, round_weight, precision)
    turned = rotate if base.family in ("gpt2", "llama") else permute_residual
    names = {rotate: "states rotated", permute_residual: "states permuted"}
    kinds = [
        (names[turned], turned),
        ("units permuted", permute_units),
        ("heads turned", turn_heads),
    ]
    left = base.unchanged - 8
    for number in range(left):
        name, change = kinds[number % 3]
        seed = 100 + number
        made, _ = derived(model, partial(change, seed=seed), f"{name}, seed {seed}")
        if number >= left - 2 and change is rotate:
            made, name = (
                with_weights(made, lambda _, w: rounded(w, "bfloat16"), name),
                f"{name}, then in bfloat16",
            )
        yield name, f"seed {seed}", made


def unexcited(
    base: Base, texts: Sequence[str]
) -> Iterator[tuple[str, str, int, Any, Any]]:
    """As `edits`: the embedding of one token that no text has, moved by its own length in a random direction."""
    tokens: Any = base.model.tokenizer
    there = {token for ids in tokens(list(texts))["input_ids"] for token in ids}
    absent = [
        token
        for token in range(len(tokens))
        if token not in {*there, *tokens.all_special_ids}
    ]
    for number, token in enumerate(random.Random(0).sample(absent, base.edits)):

        def change(
            model: PreTrainedModel, token: int = token, number: int = number
        ) -> None:
            row = cast(Any, model.get_input_embeddings()).weight.data[token]
            off = torch.randn(len(row), generator=torch.Generator().manual_seed(number))
            row.add_(off / off.norm() * row.norm())

        yield (
            "embedding of an absent token",
            str(tokens.convert_ids_to_tokens(token)),
            0,
            *derived(base.model, change, ""),
        )


def edit(
    model: PreTrainedModel, *, kind: str, block: int, part: str, strength: float, seed: int, batch: dict[str, Tensor],
    labels: Tensor, steps: int, turned: Callable[[PreTrainedModel, int], None] | None,
) -> Planted | None:  # fmt: skip
    """Change one block in place and then, perhaps, the coordinates of all states; what was planted, if that it was."""
    planted = None
    if kind == "rank one":
        rank_one(model, block, part, strength, seed)
    elif kind == "trained":
        fine_tune(model, block, batch, labels, steps, seed)
    else:
        planted = plant(model, block, batch, seed, lambda: model(**batch))
    if turned is not None:
        turned(model, seed)
    return planted


def edits(
    base: Base, batch: dict[str, Tensor], labels: Tensor, seed: int
) -> Iterator[tuple[str, str, int, Any, Any]]:
    """Kind, variant, block, model and what was planted, as many as the base asks for, then those in other coordinates.

    Six in ten are rank-one edits, at each strength in turn; then training and planted directions in equal numbers.
    """
    draw, model = random.Random(seed), base.model
    blocks = list(range(1, model.depth + 1))
    kinds = ["rank one"] * round(0.6 * base.edits)
    kinds += ["trained", "planted"] * (base.edits - len(kinds))
    for number, kind in enumerate(kinds[: base.edits] + kinds[: base.both]):
        block, part = (
            draw.choice(blocks),
            draw.choice(["q", "k", "v", "o", "up", "down"]),
        )
        own, strength = 1000 * seed + number, STRENGTHS[number % 3]
        other = number >= base.edits  # in other coordinates, too
        turned = rotate if base.family in ("gpt2", "llama") else permute_residual

        change = partial(
            edit, kind=kind, block=block, part=part, strength=strength, seed=own, batch=batch, labels=labels,
            steps=3 + number % 3, turned=turned if other else None,
        )  # fmt: skip
        made, planted = derived(model, change, f"{kind} in block {block}")
        variant = f"{part} at {strength:g}" if kind == "rank one" else ""
        yield (
            f"{kind}{', in other coordinates' if other else ''}",
            variant,
            block,
            made,
            planted,
        )


def of_weights(found: Compared) -> int | str:
    """What entry by entry the weights say: unchanged, or the first block that differs."""
    about = found.meta["weights"]
    if about is None:
        return "not compared"
    return min(about["changed"]) if about["changed"] else "unchanged"


def case(
    base: Base,
    new: FrozenModel,
    texts: Sequence[str],
    labels: Sequence[int],
    about: dict[str, Any],
) -> tuple[dict[str, Any], Compared]:
    """Compare, and say in plain values what came out."""
    began = time.process_time()
    found = compare(
        base.model, new, texts, labels=labels if base.labelled else None, batch_size=25
    )
    verdict, function = found.verdict, found.report_tables["function"]
    best = [row for row in found.rows if row["method"] == (verdict.map or "identity")]
    return {
        "model": base.name,
        "width": base.width,
        **about,
        "verdict": verdict.kind,
        "first": None if verdict.first is None else found.rows[verdict.first]["site_y"],
        "map": verdict.map,
        "weights": of_weights(found),
        "most_in_floors": max(row["fvu"] / max(row["floor"], 1e-14) for row in best),
        "answers_in_floors": max(
            (row["difference"] / row["floor"] for row in function), default=None
        ),
        "precision": found.meta["precision"],
        "seconds": round(time.process_time() - began, 1),
    }, found


def run(options: Namespace) -> Iterator[dict[str, Any]]:
    """All cases of a half, one after another."""
    judged = options.half == "judged"
    lines = (
        (options.folder / "data" / "sst2" / ("test.tsv" if judged else "dev.tsv"))
        .read_text()
        .splitlines()[1:]
    )
    chosen = random.Random(judged).sample(lines, options.texts)
    texts, labels = (
        [line.rsplit("\t", 1)[0] for line in chosen],
        [int(line.rsplit("\t", 1)[1]) for line in chosen],
    )
    for number, base in enumerate(bases(options.folder / "models", options.half)):
        if options.only and base.name not in options.only:
            continue
        base.model = base.load()
        tokens: Any = base.model.tokenizer
        batch = dict(
            tokens(
                texts[:32],
                padding=True,
                truncation=True,
                max_length=64,
                return_tensors="pt",
            )
        )
        batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
        for kind, variant, new in unchanged(base) if base.unchanged else ():
            about = {"changed": False, "kind": kind, "variant": variant, "block": None}
            result, _ = case(base, new, texts, labels, about)
            result["right"] = result["verdict"] in FINE
            yield said(result)
        edited = edits(base, batch, torch.tensor(labels[:32]), 10 * judged + number)
        for kind, variant, block, new, planted in (
            unexcited(base, texts) if options.half == "unexcited" else edited
        ):
            about = {"changed": True, "kind": kind, "variant": variant, "block": block}
            result, found = case(base, new, texts, labels, about)
            result["right"] = (
                result["verdict"] == "changed" and result["first"] == block
            )
            if planted is not None and result["right"] and "other" not in kind:
                result["cosine"] = float(
                    (found.vectors[block][0].double() @ planted.direction).abs()
                )
                result["fires_on"] = planted.share
            yield said(result)


def said(result: dict[str, Any]) -> dict[str, Any]:
    """Print a case, and return it."""
    shown = {
        name: f"{value:.3g}" if isinstance(value, float) else value
        for name, value in result.items()
    }
    print(*shown.values(), flush=True)
    return result


def table(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kind (and strength): how many cases, how many right by states and answers, how many by weights."""
    groups: dict[tuple[bool, str], list[dict[str, Any]]] = {}
    for one in cases:
        strength = (
            f", {one['variant'].split(' at ')[1]}"
            if one["kind"].startswith("rank one")
            else ""
        )
        precision = f", {one['variant']}" if one["kind"] == "rounded" else ""
        groups.setdefault(
            (one["changed"], one["kind"] + strength + precision), []
        ).append(one)
    rows = []
    for (changed, kind), members in groups.items():
        right = sum(
            one["weights"] == (one["block"] if changed else "unchanged")
            for one in members
        )
        cosines = [one["cosine"] for one in members if "cosine" in one]
        row = {
            "changed": changed,
            "kind": kind,
            "cases": len(members),
            "right": sum(one["right"] for one in members),
        }
        rows.append(
            {
                **row,
                "right_by_weights": right,
                "least_cosine": min(cosines, default=None),
            }
        )
    return rows


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path, help="folder with models and data")
    arguments.add_argument(
        "--half", choices=["development", "judged", "unexcited"], default="development"
    )
    arguments.add_argument(
        "--texts", type=int, default=150, help="half to fit on, half to compare on"
    )
    arguments.add_argument("--only", nargs="*", help="names of models")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    began, cases = time.process_time(), list[dict[str, Any]]()
    for one in run(options):
        cases.append(one)
        rows = table(cases)
        told: dict[str, Any] = {
            "machine": machine(options.device),
            "about": "Tolerances were fixed on the half `development` before the half `judged` was run, once.",
            "summary": summary(cases, options, time.process_time() - began),
            "table": rows,
            "cases": cases,
        }
        if options.json:
            write_whole(options.json, told)
    for row in (told["summary"], *rows):
        print(row, flush=True)


def summary(
    cases: Sequence[dict[str, Any]], options: Namespace, seconds: float
) -> dict[str, Any]:
    """What the bars are about."""
    plain = [one for one in cases if not one["changed"]]
    edited = [one for one in cases if one["changed"] and "other" not in one["kind"]]
    planted = [one["cosine"] for one in edited if "cosine" in one]
    return {
        "half": options.half,
        "tolerance_in_floors": TIMES,
        "texts": options.texts,
        "unchanged": len(plain),
        "false_alarms": sum(not one["right"] for one in plain),
        "alarms_of_weights": sum(one["weights"] != "unchanged" for one in plain),
        "edits": len(edited),
        "found": sum(one["right"] for one in edited),
        "found_by_weights": sum(one["weights"] == one["block"] for one in edited),
        "planted_and_found": len(planted),
        "planted_with_cosine_of_at_least_.9": sum(cosine >= 0.9 for cosine in planted),
        "cpu_seconds": round(seconds),
    }


if __name__ == "__main__":
    main()
