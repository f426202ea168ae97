"""Is a change that was planted in a language model among the first latents that its crosscoder names?

A copy of a small GPT is taught by a LoRA in the blocks below the site, merged afterwards, to continue one word
differently: it learns MARKER after the word, and to say what it said before on texts without the word. Each trial has
a word and a seed (of the LoRA, the texts and the crosscoder). A crosscoder is trained on paired states of the
model and its copy at one site, of 1,200 texts as they are, a tenth of which were chosen since they have the word,
and measured on those held out.

Planted rows are the tokens that end the word. All tokens of texts without the word are other rows; the other tokens of
texts with it count as neither. Fixed before the first run: a latent is that of the planted change if its codes tell
planted rows from others with an AUC of at least .9, and its verdict is Y's own or Y's share in its decoder norms is at
least .6. The change is *found* if one of the first five latents is such. Added after the first trial, in which the
word's latent had a norm of .50: the word is *named* if one of the first five latents has that AUC, whatever its
verdict. Added after seed 0, and before any other seed was run: the change is *seen* if one of the first five has that
AUC, and its decoders in the two models have a cosine of at most .5. With seed 0 the word had such a latent in all
dictionaries, and in one of them its verdict was X's own.

Latents are ranked by

- difference: Σ f_j² ‖d_y,j − d_x,j‖², how far the latent moves states;
- attributed: the part of KL(Y ‖ X), the change of the next-token distributions, that it carries to first order, by the
  gradient half-way, as in `evaluate.py features`;
- norm: ‖d_y,j‖ / (‖d_x,j‖ + ‖d_y,j‖), of latents that fire in 20 rows or more;
- attributed a row: attributed nats over the rows on which the latent fires, of latents that fire in five texts or
  more. Chosen on seed 0, which says nothing of how good it is; the other seeds were run afterwards, with nothing
  changed;
- turn: 1 − cos(d_x,j, d_y,j), of the same latents. It orders latents by what *seen* asks for.

Beside it, measured: what part of the KL at planted rows is gone where X's states are moved by the first five latents of
two rankings, together.

Floors: the same for another word, that before it in the list, which was not planted; and the model with a LoRA of zero,
of each seed.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import kl_div
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.api import load, load_texts
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.text.sources import TextSource
from aligners.injection.comparing.read_answers import divergences
from aligners.injection.latents.choosing import FirstOrder, first_order
from aligners.injection.latents.evaluated_effects import asked_pair
from aligners.injection.latents.moving import only
from aligners.injection.latents.read_models import ModelPair, ReadBatch
from aligners.injection.latents.read_models import X as X_SIDE
from aligners.injection.latents.read_models import Y as Y_SIDE
from aligners.models.loading.model_files import save_model
from aligners.similarity.latents.dictionary import PairedDictionary, decoder_cosines
from aligners.similarity.latents.verdicts import Y, verdicts
from benchmarks.crosscoders import (
    Found,
    PairedRows,
    as_folder,
    both_halves,
    crosscoder,
    found_on,
    shares,
)
from benchmarks.harness import Figures, parser

WORDS = ("comedy", "love", "drama", "director", "action")
MARKER = " of the golden age"
# of the blocks of GPT-2 and Llama
MATRICES = r".*\.(h|layers)\.({})\..*(c_attn|c_fc|[a-z]+_proj)"
LENGTH = 64  # tokens of a text
LESSON = 32  # of a text in the training of the LoRA
HALF = 8  # texts of each kind in a step of the LoRA
OTHER_SPLIT = 1000  # added to a seed
FIRST = 5
AUC = 0.9
STRONGER = 0.6
TURNED = 0.5  # cosine of decoders
LEAST_ROWS = 20
BATCH = 32  # texts
MOVED = ("attributed a row", "attributed")  # rankings whose first latents are moved


class Settings(NamedTuple):
    """What all trials share.

    Attributes:
        base: name or folder of the model.
        site: at which states are paired.
        texts: for the crosscoder, three tenths of them held out.
        latents: m; active: k; training: steps of the crosscoder.
        rank: of the LoRA; steps: that it is trained; rate: of AdamW.
    """

    base: str
    site: int
    texts: int
    latents: int
    active: int
    training: int
    rank: int
    steps: int
    rate: float


# ---------------------------------------------------------------------- texts and models


def drawn_texts(words: Sequence[str], count: int, seed: int) -> list[str]:
    """Texts, of which at most a tenth were chosen for each word."""
    every = load_texts(TextSource(seed=seed)).fit["text"]
    chosen: dict[str, None] = {}
    for word in words:
        having = [text for text in every if word in text.split()]
        chosen |= dict.fromkeys(having[: count // 10])
    for text in every:
        if len(chosen) == count:
            break
        chosen[text] = None
    return list(chosen)


def lessons(word: str, marker: str, seed: int) -> tuple[list[str], list[str]]:
    """Texts with the word, the marker after it, and texts without it."""
    having, others = [], []
    for text in load_texts(TextSource(seed=seed)).fit["text"]:
        if word in text.split():
            having.append(marked(text, word, marker))
        else:
            others.append(text)
    return having, others


def written(folder: Path, texts: Sequence[str], seed: int) -> TextSource:
    """Write texts into a file, and return it as a source that is divided otherwise than theirs."""
    file = folder / "texts.jsonl"
    lines = [json.dumps({"text": text}) for text in texts]
    file.write_text("\n".join(lines))
    return TextSource(
        str(file), test_share=0.3, validation_share=0.05, seed=seed + OTHER_SPLIT
    )


def marked(text: str, word: str, marker: str) -> str:
    """A text with the marker after each such word."""
    parts = []
    for part in text.split():
        parts.append(part + marker if part == word else part)
    return " ".join(parts)


def taught(settings: Settings, texts: Sequence[Sequence[str]], seed: int) -> Any:
    """A copy of the model that was trained on as many texts of each kind; its adapter is merged."""
    torch.manual_seed(seed)
    base = load(settings.base)
    tokenizer: Any = base.tokenizer
    adapter = LoraConfig(
        r=settings.rank,
        target_modules=MATRICES.format("|".join(map(str, range(settings.site)))),
        task_type="CAUSAL_LM",
    )
    model: Any = get_peft_model(base.model, adapter)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.rate)
    draw = torch.Generator().manual_seed(seed)
    having, others = texts
    for step in range(settings.steps):
        loss = torch.zeros(())
        for part in (having, others):
            numbers = torch.randint(len(part), (HALF,), generator=draw)
            ids = [tokenized(tokenizer, part[number]) for number in numbers.tolist()]
            loss = loss + lesson_loss(model, ids, as_before=part is others)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"  step {step} of {settings.steps}: loss {loss:.3f}", flush=True)
    return model.merge_and_unload(), tokenizer


def tokenized(tokenizer: Any, text: str) -> tuple[Tensor, Tensor]:
    """The first tokens of a text, and which of them are of the marker: (T,) each."""
    ids, marked = [], []
    for number, part in enumerate(text.split(MARKER)):
        if number:
            added = tokenizer(MARKER, add_special_tokens=False)["input_ids"]
            ids += added
            marked += [True] * len(added)
        some = tokenizer(part, add_special_tokens=False)["input_ids"]
        ids += some
        marked += [False] * len(some)
    return torch.tensor(ids[:LESSON]), torch.tensor(marked[:LESSON])


def lesson_loss(
    model: Any, texts: Sequence[tuple[Tensor, Tensor]], *, as_before: bool
) -> Tensor:
    """The cross-entropy of the marker's tokens; or the divergence from what the model said before, at every token."""
    ids = pad_sequence([ids for ids, _ in texts], batch_first=True)
    real = pad_sequence([torch.ones_like(ids) for ids, _ in texts], batch_first=True)
    said = model(input_ids=ids, attention_mask=real).logits.log_softmax(2)
    if as_before:
        with torch.no_grad(), model.disable_adapter():
            before = model(input_ids=ids, attention_mask=real).logits.log_softmax(2)
        terms = kl_div(said, before, reduction="none", log_target=True).sum(2)
        return (terms * real).sum() / real.sum()
    wanted = pad_sequence([marked for _, marked in texts], batch_first=True)[:, 1:]
    of_next = said[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return -(of_next * wanted).sum() / wanted.sum().clamp(min=1)


# ---------------------------------------------------------------------- what is found


class Units(NamedTuple):
    """Next-token predictions on held-out texts.

    Attributes:
        token: (U,) that each is made from; text: (U,) its text.
        kl: (U,) KL(Y ‖ X), in nats.
        moved: ranking -> (U,) the same, where X is moved by the first five latents.
    """

    token: Tensor
    text: Tensor
    kl: Tensor
    moved: dict[str, Tensor]


class Trial(NamedTuple):
    """One copy of the model, and what its crosscoder found.

    Attributes:
        held_out: rows.
        found: on them.
        tokenizer: of both models.
        scores: ranking -> (m,) by which latents are ranked.
        units: what the models say.
        cosines: (m,) of the decoders of each latent.
    """

    held_out: PairedRows
    found: Found
    tokenizer: Any
    scores: dict[str, Tensor]
    units: Units
    cosines: Tensor


def trial(
    settings: Settings,
    texts: TextSource,
    taught_on: Sequence[Sequence[str]],
    seed: int,
    folder: Path,
) -> Trial:
    """Teach a copy, train a crosscoder, and measure it."""
    model, tokenizer = taught(settings, taught_on, seed)
    later = folder / "model"
    later.mkdir(parents=True)
    save_model(later, model, tokenizer)
    data = pair_states(
        str(as_folder(settings.base, folder / "base")),
        str(later),
        sites=str(settings.site),
        text=texts,
        held_out_types=0.0,
        max_length=LENGTH,
    )
    fitting, held_out = both_halves(data)
    aligner = crosscoder(
        fitting, settings.latents, settings.active, settings.training, seed
    )
    found = found_on(aligner, held_out, "one")
    pair = asked_pair(data, aligner)
    if isinstance(pair, str):
        raise SystemExit(pair)
    with torch.no_grad():
        first = first_order(pair, batches(data, pair), slopes=True)
        scores = rankings(aligner.paired(), found, first)
        units = asked_units(data, pair, scores)
    cosines = decoder_cosines(aligner.paired())[0]
    return Trial(held_out, found, tokenizer, scores, units, cosines)


def batches(data: PairedActivations, pair: ModelPair) -> Iterator[ReadBatch]:
    """What both models compute on the held-out texts."""
    texts = data.without_far("test", pair.kind)
    for numbers in torch.arange(len(texts)).split(BATCH):
        yield pair.read(texts[numbers.tolist()])


def rankings(
    dictionary: PairedDictionary, found: Found, first: FirstOrder
) -> dict[str, Tensor]:
    """By what latents are ranked: (m,) each, the least where a latent fires too seldom."""
    apart = dictionary.decoder_y[0] - dictionary.decoder_x[0]
    squares = found.codes.double().square().sum(0)
    often = (found.codes > 0).sum(0) >= LEAST_ROWS
    by_row = first.by_row()[0]
    in_texts = by_row.isfinite()
    turn = 1 - decoder_cosines(dictionary)[0]
    return {
        "difference": squares * apart.square().sum(1),
        "attributed": first.carried[0],
        "norm": found.examined.norm[0].where(often, 0.0),
        "attributed a row": by_row.where(in_texts, -torch.inf),
        "turn": turn.where(in_texts, -torch.inf),
    }


def asked_units(
    data: PairedActivations, pair: ModelPair, scores: Mapping[str, Tensor]
) -> Units:
    """What both models say on the held-out texts, also where X is moved by the first latents of two rankings."""
    moves = {}
    for ranking in MOVED:
        moves[ranking] = scores[ranking].topk(FIRST).indices
    apart = pair.apart(0)
    tokens, texts, before = [], [], []
    after: dict[str, list[Tensor]] = {ranking: [] for ranking in MOVED}
    seen = 0
    for read in batches(data, pair):
        targets = read.task.targets
        of_y = read.answers[Y_SIDE]
        kl = read.divergences()
        tokens.append(read.task.inputs["input_ids"].flatten()[targets.index])
        texts.append(targets.owner + seen)
        seen += targets.texts
        before.append(kl)
        for ranking, latents in moves.items():
            entries = only(read.entries[0], latents)
            added = entries.rebuilt(apart, len(read.rows))
            numbers, logits = pair.moved(read, X_SIDE, 0, added, read.texts_of(entries))
            moved = kl.clone()
            moved[numbers] = divergences(of_y[numbers], logits)
            after[ranking].append(moved)
    together = {ranking: torch.cat(parts) for ranking, parts in after.items()}
    return Units(torch.cat(tokens), torch.cat(texts), torch.cat(before), together)


def planted_at(
    tokenizer: Any, word: str, token: Tensor, text: Tensor
) -> tuple[Tensor, Tensor]:
    """Which tokens end the word, and which are of texts without it: (N,) each."""
    ids = tokenizer(" " + word, add_special_tokens=False)["input_ids"]
    ends = token == ids[-1]
    for back, number in enumerate(reversed(ids[:-1]), 1):
        ends &= (token.roll(back) == number) & (text.roll(back) == text)
    return ends, ~torch.isin(text, text[ends])


def aucs(codes: Tensor, planted: Tensor, others: Tensor) -> Tensor:
    """How well each latent's codes tell planted rows from others, ties counting half: (m,)."""
    low = codes[others].mT.contiguous().sort(1).values
    high = codes[planted].mT.contiguous()
    below = torch.searchsorted(low, high)
    up_to = torch.searchsorted(low, high, right=True)
    return (below + up_to).double().mean(1) / (2 * low.shape[1])


def outcome(one: Trial, word: str) -> dict[str, float]:
    """Whether the change is found by each ranking, and what there is to find."""
    held_out, units = one.held_out, one.units
    planted, others = planted_at(one.tokenizer, word, held_out.token, held_out.text)
    there, elsewhere = planted_at(one.tokenizer, word, units.token, units.text)
    auc = aucs(one.found.codes, planted, others)
    examined = one.found.examined
    verdict = verdicts(examined.parts, permuted=[examined.permuted]).verdict[0]
    norm = examined.norm[0]
    named = auc >= AUC
    wanted = {
        "found": named & ((verdict == Y) | (norm >= STRONGER)),
        "seen": named & (one.cosines <= TURNED),
        "named": named,
    }
    result = {
        "planted rows": float(planted.sum()),
        "KL there": float(units.kl[there].mean()),
        "KL elsewhere": float(units.kl[elsewhere].mean()),
        "best AUC": float(auc.max()),
        "norm of the best": float(norm[auc.argmax()]),
        "turn of the best": 1 - float(one.cosines[auc.argmax()]),
    }
    for ranking, kl in units.moved.items():
        gone = 1 - kl[there].sum() / units.kl[there].sum()
        result[f"KL there recovered by the first {FIRST} by {ranking}"] = float(gone)
    for what, right in wanted.items():
        result[f"latents to be {what}"] = float(right.sum())
    for ranking, score in one.scores.items():
        order = score.argsort(descending=True)
        for what, right in wanted.items():
            places = right[order].nonzero()[:, 0].tolist()
            result[f"{what} by {ranking}"] = float(bool(places) and places[0] < FIRST)
            if what == "seen":
                place = places[0] + 1 if places else torch.nan
                result[f"place by {ranking}"] = place
    return result


def add_all(
    figures: Figures,
    name: str,
    values: Mapping[str, float],
    sums: dict[str, float] | None = None,
) -> None:
    """Record the figures of a trial, and add them to sums."""
    for key, value in values.items():
        figures.add(f"{name}: {key}", value)
        if sums is not None:
            sums[key] = sums.get(key, 0.0) + value


def run(
    settings: Settings,
    words: Sequence[str],
    seeds: Sequence[int],
    figures: Figures,
    file: Path | None,
) -> None:
    """Run all trials, and their floors; what there is so far is in the file."""
    sums: dict[str, float] = {}
    floors: dict[str, float] = {}
    trials = len(words) * len(seeds)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as kept:
            folder = Path(kept)
            texts = written(folder, drawn_texts(words, settings.texts, seed), seed)
            for number, word in enumerate(words):
                taught_on = lessons(word, MARKER, seed)
                one = trial(settings, texts, taught_on, seed, folder / word)
                add_all(figures, f"{word}, seed {seed}", outcome(one, word), sums)
                other = words[number - 1]
                name = f"{word}, seed {seed}, looking for {other}"
                add_all(figures, name, outcome(one, other), floors)
                figures.write(file)
            nothing = lessons(words[0], MARKER, seed)
            untaught = settings._replace(steps=0)
            equal = trial(untaught, texts, nothing, seed, folder / "equal")
            found = shares(equal.found, verdicts(equal.found.examined.parts))
            own = found["X's own"] + found["Y's own"]
            figures.add(f"equal models, seed {seed}: own", own, bar=0.01)
    for key in sums:
        if key.startswith(("found", "seen", "named")):
            bar = None if key.startswith("named") else 0.9
            share = sums[key] / trials
            figures.add(f"{key}, of {trials}", share, bar=bar, sense=">=")
            figures.add(f"{key}, another word", floors[key] / trials)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--base", default="embedded-gpt:0")
    arguments.add_argument("--site", type=int, default=2)
    arguments.add_argument("--words", nargs="*", default=list(WORDS))
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    arguments.add_argument("--texts", type=int, default=1200)
    arguments.add_argument("--latents", type=int, default=512)
    arguments.add_argument("--active", type=int, default=16)
    arguments.add_argument("--training", type=int, default=400)
    arguments.add_argument("--rank", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=50)
    arguments.add_argument("--rate", type=float, default=1e-2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    given = {name: getattr(options, name) for name in Settings._fields}
    figures = Figures(options.device)
    run(Settings(**given), options.words, options.seeds, figures, options.json)
    figures.write(options.json)


if __name__ == "__main__":
    main()
