"""Is a change that was planted in a language model among the first latents that its crosscoder names?

A copy of a small GPT is taught by a LoRA in the blocks below the site, merged afterwards, to continue one word
differently: it learns MARKER after the word, and to say what it said before on texts without the word. Each trial has
a word and a seed (of the LoRA, the texts and the crosscoder). A crosscoder is trained on paired states of the
model and its copy at one site, of 1,200 texts as they are, a tenth of which were chosen since they have the word,
and measured on those held out.

Planted rows are the tokens that end the word. All tokens of texts without the word are other rows; the other tokens of
texts with it count as neither. Fixed before the first run: a latent is that of the planted change if its codes tell
planted rows from others with an AUC of at least .9, and its verdict is Y's own or Y's share in its decoder norms is at
least .6. The change is found if one of the first five latents is such. Added after the first trial, in which the word's
latent had a norm of .50: the word is named if one of the first five latents has that AUC, whatever its verdict.

Latents are ranked by

- difference: Σ f_j² ‖d_y,j − d_x,j‖², how far the latent moves states;
- attributed: the part of KL(Y ‖ X), the change of the next-token distributions, that it carries to first order:
  −Σ f_j (d_y,j − d_x,j)·∂KL/∂x (attribution patching);
- norm: ‖d_y,j‖ / (‖d_x,j‖ + ‖d_y,j‖), of latents that fire in 20 rows or more.

Floors: the same for another word, that before it in the list, which was not planted; and the model with a LoRA of zero,
of each seed.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.models.loading.model_files import save_model
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
LEAST_ROWS = 20


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


class Trial(NamedTuple):
    """One copy of the model, and what its crosscoder found.

    Attributes:
        held_out: rows.
        found: on them.
        tokenizer: of both models.
        scores: ranking -> (m,) by which latents are ranked.
        kl: (N,) KL(Y ‖ X) at each row, in nats.
    """

    held_out: PairedRows
    found: Found
    tokenizer: Any
    scores: dict[str, Tensor]
    kl: Tensor


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
    dictionary = aligner.paired()
    apart = dictionary.decoder_y[0] - dictionary.decoder_x[0]
    squares = found.codes.double().square().sum(0)
    often = (found.codes > 0).sum(0) >= LEAST_ROWS
    carried, kl = attributed(data, aligner, apart.float(), settings.site)
    scores = {
        "difference": squares * apart.square().sum(1),
        "attributed": carried,
        "norm": found.examined.norm[0].where(often, 0.0),
    }
    return Trial(held_out, found, tokenizer, scores, kl)


def attributed(
    data: PairedActivations, aligner: SparseAligner, apart: Tensor, site: int
) -> tuple[Tensor, Tensor]:
    """What each latent carries of KL(Y ‖ X) on the held-out texts, (m,), and the KL at each row, (N,)."""
    model, later = data.frozen
    carried = torch.zeros(len(apart))
    divergences, texts = [], []
    for batch in data.batches("test", shuffle=False):
        inputs = batch.texts.inputs[0]
        index = batch.rows.index
        with torch.no_grad():
            (state,) = model.front(inputs, [site])
            wanted = later.logits(inputs).flatten(0, 1)[index].log_softmax(1)
        state = state.detach().requires_grad_()
        logits = model.tail(inputs, site, state).flatten(0, 1)[index]
        terms = kl_div(logits.log_softmax(1), wanted, reduction="none", log_target=True)
        kl = terms.sum(1)
        (gradient,) = torch.autograd.grad(kl.sum(), state)
        slopes = gradient.flatten(0, 1)[index]
        codes = aligner.codes(batch.x, batch.y)[0]
        carried -= (codes * (slopes @ apart.mT)).sum(0)
        divergences.append(kl.detach())
        texts.append(batch.text)
    order = torch.cat(texts).argsort(stable=True)
    return carried, torch.cat(divergences)[order]


def planted_rows(one: Trial, word: str) -> tuple[Tensor, Tensor]:
    """Which rows end the word, and which are of texts without it: (N,) each."""
    ids = one.tokenizer(" " + word, add_special_tokens=False)["input_ids"]
    token, text = one.held_out.token, one.held_out.text
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
    planted, others = planted_rows(one, word)
    auc = aucs(one.found.codes, planted, others)
    examined = one.found.examined
    verdict = verdicts(examined.parts, permuted=[examined.permuted]).verdict[0]
    norm = examined.norm[0]
    right = (auc >= AUC) & ((verdict == Y) | (norm >= STRONGER))
    result = {
        "planted rows": float(planted.sum()),
        "KL there": float(one.kl[planted].mean()),
        "KL elsewhere": float(one.kl[others].mean()),
        "such latents": float(right.sum()),
        "best AUC": float(auc.max()),
        "norm of the best": float(norm[auc.argmax()]),
        "best AUC of stronger ones": float((auc * (norm >= STRONGER)).max()),
    }
    for ranking, score in one.scores.items():
        order = score.argsort(descending=True)
        places = right[order].nonzero()[:, 0].tolist()
        result[f"place by {ranking}"] = places[0] + 1 if places else torch.nan
        result[f"found by {ranking}"] = float(bool(places) and places[0] < FIRST)
        result[f"named by {ranking}"] = float((auc[order[:FIRST]] >= AUC).any())
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
        if key.startswith(("found", "named")):
            bar = 0.9 if key.startswith("found") else None
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
