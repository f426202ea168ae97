"""What the cells of a study will cost: formulas over sizes of models, options and assumed lengths of texts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from aligners.cli.cells.cell_options import CellOptions
from aligners.cli.cells.loads import FLOAT, Load, Training
from aligners.datamodules.rows.policies import most_rows
from aligners.datamodules.rows.sites import parse_layers, parse_sites
from aligners.datamodules.text.sources import TextSource, known_source
from aligners.files.resources import in_words
from aligners.files.yaml_tables import table_beside
from aligners.fitting.parts import bytes_a_site, pairs_within
from aligners.injection.routes import route_numbers
from aligners.maps.inn import INN
from aligners.probing.probes import STRUCTURAL, USUAL_RANK
from aligners.probing.word_states import USUAL
from aligners.similarity.catalogue import catalogue
from aligners.similarity.passes.sums import Shape
from aligners.similarity.passes.work import DOUBLE, comparison_work
from aligners.similarity.similarity_evaluation import GROUPS
from aligners.studies import study_plan
from aligners.studies.cells import Cell, expand
from aligners.studies.spec import Study
from aligners.studies.study_plan import Cost, Plan, Size, TextSizes, sizes_in

FLOOR_METHODS = 3  # mean, identity, random_embedding
COPIES = 3  # of a trained weight in a checkpoint, besides itself: Adam's two averages and the best so far
DECOMPOSED = 30.0  # × d³: FLOP of the decompositions of a closed form
MOMENT = 8  # bytes
SPANS = 1.5  # of a target of an edge probe, on average
ABOUT = table_beside(__file__, "costs.yaml")


class Costs:
    """Estimates the cost of cells.

    Args:
        study: the study.
        options: what the commands say of their options.
        sizes: of the models, by their names in the study file.
    """

    def __init__(self, study: Study, options: CellOptions, sizes: Mapping[str, Size]) -> None:
        self.study, self.options, self.sizes = study, options, sizes
        self._known: dict[object, Cost] = {}

    def of(self, cell: Cell) -> Cost:
        """The cost of a cell: the same for all of its kind, task and texts with models of the same sizes."""
        if cell.kind not in COSTS:
            return Cost()
        key = (
            cell.kind,
            cell.task,
            str(cell.options["data"].get("text")),
            *sizes_in(cell, self.sizes),
            cell.pairs,
        )
        if key not in self._known:
            load = self.load(cell)
            self._known[key] = replace(COSTS[cell.kind](load), texts=load.texts)
        return self._known[key]

    def load(self, cell: Cell) -> Load:
        """What a cell computes; the data options of an `inject` are those of what it injects."""
        of_task = {**self.study.data, **self.study.tasks.get(cell.task or "", {})}
        parsed, built = self.options.of(cell, of_task if cell.kind == "inject" else {})
        split = study_plan.text_sizes(TextSource(**parsed.data.text.as_dict()), self.study.assume)
        return Load(self.study, parsed, built, sizes_in(cell, self.sizes), cell.pairs, split)


# ---------------------------------------------------------------------- kinds of cells


def _fit(load: Load) -> Cost:
    """All models read the texts once for moments, then for every row trained on, and in every validation.

    6 FLOP for each trained weight, row and site, 12 where both directions are trained, a third of it in validations;
    30 d³ of decompositions for each closed form and site. With `sites_at_once` every part reads the texts. A recovery
    is measured on the held-out texts, too, and has the networks to be recovered of every row: 2 FLOP for each weight.
    """
    x, y = (load.sizes * 2)[:2]
    data = load.parsed.data
    recovers = "couplings" in data
    read, step = load.rows(load.texts.fit), load.rows(data.batch_size)
    maps = [fit.aligner for fit in load.made.model.made(1, x.width, y.width)]
    trained = [aligner for aligner in maps if not aligner.closed_form]
    trainable = {
        aligner: sum(weight.numel() for weight in aligner.parameters()) for aligner in trained
    }
    weights = sum(count * (2 if aligner.both_ways else 1) for aligner, count in trainable.items())
    products = x.width**2 + y.width**2 + x.width * y.width
    moments = MOMENT * products
    stored = moments + sum(
        value.nbytes for aligner in maps for value in aligner.state_dict().values()
    )
    training = load.trained(read, step) if weights else Training(0.0, 0.0, 0.0)
    watched = (
        2 * load.validated(training, 1) + recovers * load.texts.test
    )  # and as many fitting texts
    passes = 1 + training.rows / read + watched / load.texts.fit
    drawn = (
        INN(1, x.width, x.width, couplings=data.couplings, hidden=x.width, mixing="none")
        if recovers
        else None
    )
    targets = sum(weight.numel() for weight in drawn.parameters()) if drawn else 0
    on_maps = (
        6.0 * weights * (training.rows + load.rows(1) * watched / 3) + 2.0 * targets * passes * read
    )
    places = len(parse_sites(data.get("sites", "all"), x.layers, y.layers)) * load.pairs
    places *= (
        len(data.get("strengths", [0]))
        * data.get("targets", 1)
        * (1 + (data.get("direction") == "both"))
    )
    at_once = min(
        places, getattr(load.parsed, "sites_at_once", None) or places
    )  # each part reads the texts
    passes *= math.ceil(places / at_once)
    reading = passes * load.reading(load.texts.fit)
    return Cost(
        passes=len(load.sizes) * passes,
        flops=reading + places * (on_maps + DOUBLE * 2.0 * read * products),
        solved=places * (len(maps) - len(trained)) * DECOMPOSED * max(x.width, y.width) ** 3,
        calls=passes * load.calls(load.texts.fit),
        reading=reading,
        disk=0.0 if load.study.keep == "results" else places * stored,
        memory=load.memory + at_once * bytes_a_site(load.made.model, x.width, y.width, step),
        **load.saving(training, at_once * (stored + COPIES * FLOAT * sum(trainable.values()))),
    )


def _attention(load: Load) -> Cost:
    """Reading alone, as of a fit: maps between a dozen heads cost next to nothing."""
    data = load.parsed.data
    a_text = load.tokens ** (1 if data.queries == "mean" else 2) * data.share
    training = load.trained(load.texts.fit * a_text, data.batch_size * a_text)
    watched = 2 * load.validated(training, 1)
    passes = 1 + training.epochs + (watched + load.texts.test) / load.texts.fit
    return Cost(2 * passes, passes * load.reading(load.texts.fit), memory=load.memory)


def _inject(load: Load) -> Cost:
    """Both models read the held-out texts; on average half of Y, if it has a head, runs again for each method and site.

    A store of one row a text does not have the tokens that are replaced.
    """
    x, y = load.sizes
    sites = len(parse_sites(load.parsed.data.sites, x.layers, y.layers))
    fitted = (
        {}
        if load.study.fit is None
        else load.study.fit.options.get("model", {}).get("aligners", {})
    )
    methods = len({*fitted, *load.parsed.closed_form}) + FLOOR_METHODS
    targets = [
        size
        for size in ([y, x] if load.parsed.both_directions else [y])
        if size.head or not size.known
    ]
    tails = load.reading(load.texts.test, targets) * methods * sites / 2
    times = 2 if load.parsed.fitting_errors else 1  # as many fitting texts as are held out
    fronts = times * load.reading(load.texts.test)
    calls = (
        times * load.calls(load.texts.test)
        + load.calls(load.texts.test, targets) * methods * sites / 2
    )
    stored = 0.0 if load.parsed.data.store_rows == "texts" else fronts
    return Cost(
        passes=2 * times, flops=fronts + tails, calls=calls, reading=stored, memory=load.memory
    )


def _similarity(load: Load) -> Cost:
    """Each model reads the held-out texts, with controls also the fitting texts, and so does its untrained twin.

    4 × d_x × d_y FLOP a row, pair of models and pair of layers, in float64. Decompositions of each layer, 9 d³ for each
    whitening, and of each pair of layers, 9 d³ for `cca` and 20 (d / 2)³ for SVCCA and PWCCA; with controls these again
    for each of them, and for each group that a jackknife leaves out.
    """
    parsed, sizes = load.parsed, load.sizes
    depths = [len(parse_layers(parsed.data.layers, size.layers)) for size in sizes]
    layers = [depth * size.width for depth, size in zip(depths, sizes, strict=True)]
    products = sum(a * b for i, a in enumerate(layers) for b in layers[i:])
    names = {parsed.measures} if isinstance(parsed.measures, str) else set(parsed.measures)
    computed, solved = comparison_work(
        [measure for measure in catalogue().values() if {measure.name, "all"} & names],
        [Shape(depth, size.width) for depth, size in zip(depths, sizes, strict=True)],
        load.rows(load.texts.test),
        load.rows(parsed.data.batch_size),
        parsed.controls,
        parsed.groups or GROUPS,
        parsed.permutations,
    )
    sums = MOMENT * products
    read = 2 * load.texts.test + load.texts.fit if parsed.controls else load.texts.test
    reading = load.reading(read)
    return Cost(
        passes=len(sizes) * (3 if parsed.controls else 1),
        flops=reading + computed,
        solved=solved,
        calls=load.calls(read),
        reading=reading,
        memory=sums if parsed.memory is None else min(sums, parsed.memory * 1e9),
    )


def _probe(load: Load) -> Cost:
    """A model and its untrained twin read both splits; 6 FLOP for each weight of a probe, word and epoch.

    A third of `training.max_epochs`; codes double that. Edge probes project one span or two, and have a hidden layer.
    """
    (size,), parsed = load.sizes, load.parsed
    rows = load.rows(load.texts.fit)
    sources = 2 if parsed.controls else 1  # the model, and its untrained twin
    layers = len(parse_layers(parsed.data.layers, size.layers))
    probes, tasks = layers * (sources + int(parsed.controls)) * parsed.seeds, parsed.tasks or USUAL
    trees = size.width * sum(parsed.ranks or [min(USUAL_RANK, size.width)])
    edges = SPANS * parsed.projection * (size.width + parsed.hidden)
    weights = sum(trees if task in STRUCTURAL else edges for task in tasks)
    trained = (
        6.0
        * rows
        * parsed.training.max_epochs
        / 3
        * probes
        * weights
        * (2 if parsed.portions else 1)
    )
    reading = sources * load.reading(load.texts.fit + load.texts.test)
    memory = load.memory + FLOAT * 2 * rows * layers * sources * size.width
    return Cost(passes=sources, flops=reading + trained, reading=reading, memory=memory)


def _compare(load: Load) -> Cost:
    """Both models read at most `most` texts of both splits, some again, and half of the new one per site."""
    texts, sites = (
        (min(load.parsed.most, count) for count in (load.texts.fit, load.texts.test)),
        load.sizes[1].layers,
    )
    fit, test = texts
    again = (
        2 * (2 + sites) * min(load.parsed.costs, test)
    )  # rounding, and old states in the new model, raw and mapped
    flops, calls = (
        count(fit + test) + count(again, load.sizes[1:]) for count in (load.reading, load.calls)
    )
    return Cost(passes=2, flops=flops, calls=calls, memory=load.memory)


def _carry(load: Load) -> Cost:
    """Both models read the fitting and the held-out texts; maps at a site cost two decompositions, 60 d³, or fewer."""
    texts, width = load.texts.fit + load.texts.test, max(size.width for size in load.sizes)
    reading = load.reading(texts)
    solved = 2 * DECOMPOSED * load.sizes[0].layers * width**3
    return Cost(
        passes=2,
        flops=reading,
        solved=solved,
        calls=load.calls(texts),
        reading=reading,
        memory=load.memory,
    )


def _stitch(load: Load) -> Cost:
    """Fronts, then half of Y for each route, layer and site, three times in training; held out, the identity too."""
    data, models, size, maps = (
        load.parsed.data,
        len(load.sizes),
        load.sizes[-1:],
        len(load.made.model.factories),
    )
    training = load.trained(load.texts.fit, data.batch_size)
    trained, watched = training.rows, load.validated(training, 1)
    read = trained + watched + load.texts.test
    routes = len(route_numbers(models, load.parsed.model.routes))
    tails = routes * len(parse_sites(data.sites, load.sizes[0].layers, size[0].layers)) / 2
    again = tails * (maps * (3 * trained + watched) + (maps + 1) * load.texts.test)  # texts
    flops, calls = (
        load.reading(read) + load.reading(again, size),
        load.calls(read) + load.calls(again, size),
    )
    return Cost(
        passes=models * read / load.texts.fit, flops=flops, calls=calls, memory=2 * load.memory
    )


def _identity(load: Load) -> Cost:
    """The held-out texts once; then half of Y for each pair, at every block."""
    times = 1 + len(load.sizes) * load.sizes[0].layers / 2
    flops, calls = times * load.reading(load.texts.test), times * load.calls(load.texts.test)
    return Cost(passes=len(load.sizes), flops=flops, calls=calls, memory=load.memory)


def _finetune(load: Load) -> Cost:
    """Three times a pass in every epoch, one over the validation texts, and at the end one over the held-out texts."""
    variants = len(load.parsed.variants)
    answers = known_source(TextSource(**load.parsed.data.text.as_dict())).answers
    training = load.trained(load.texts.fit, answers * load.parsed.data.batch_size)
    watched = load.validated(training) + load.texts.test
    return Cost(
        passes=variants * (training.epochs + watched / load.texts.fit),
        flops=variants * load.reading(3 * training.rows + watched),
        calls=variants * load.calls((3 * training.rows + watched) / answers),
        disk=variants * load.memory,
        memory=4 * load.memory,  # weights, gradients, two moments
        **load.saving(training, 3 * load.memory),
    )


def _surgery(load: Load) -> Cost:
    """A pass an epoch of the heads; a skipped span i..j leaves L - j blocks to run, (L² - 1) / 6 passes for all."""
    epochs = max(0, load.parsed.trainer.max_epochs or 0)
    heads = epochs * load.texts.fit + load.texts.test
    spans = [(load.texts.test * (size.layers**2 - 1) / 6, [size]) for size in load.sizes]
    flops, calls = (
        count(heads) + sum(count(*span) for span in spans) for count in (load.reading, load.calls)
    )
    return Cost(passes=len(load.sizes) * (epochs + 1), flops=flops, calls=calls, memory=load.memory)


COSTS: dict[str, Callable[[Load], Cost]] = {
    **dict.fromkeys(("fit", "fit_pairs", "recover"), _fit),
    **{
        "attention": _attention,
        "inject": _inject,
        "similarity": _similarity,
        "probe": _probe,
        "stitch": _stitch,
    },
    **{
        "compare": _compare,
        "carry": _carry,
        "identity": _identity,
        "finetune": _finetune,
        "surgery": _surgery,
    },
}


def formulas() -> str:
    """How costs are estimated, in words: what each function says of itself."""
    kinds: dict[str, list[str]] = {}
    for kind, cost in COSTS.items():
        kinds.setdefault(" ".join((cost.__doc__ or "").split()), []).append(kind)
    lines = (f"{', '.join(names)}: {formula}" for formula, names in kinds.items())
    return ABOUT["estimates"].format(
        kinds="\n".join(lines),
        start=study_plan.START,
        call=study_plan.CALL,
        solving=study_plan.SOLVING,
    )


# ---------------------------------------------------------------------- the whole study


def plan_study(costs: Costs, cells: Sequence[Cell], rate: float | None, workers: int) -> Plan:
    """Plan the cells of a study.

    Args:
        costs: estimates them.
        cells: of the study.
        rate: FLOP a second of one worker; None: measured on this machine, at the widest model.
        workers: cells at a time.
    """
    assume, unknown = (
        costs.study.assume,
        [name for name, size in costs.sizes.items() if not size.known],
    )
    rated, solving = "`--rate`", study_plan.SOLVING
    if rate is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        width = max(size.width for size in costs.sizes.values())
        rate, solving = study_plan.measured_rates(width, assume.tokens, workers, device)
        rated = f"measured here, {device}; `--rate`"
    notes = [f"A text has {assume.tokens} tokens (`assume`)."]
    if unknown:
        notes.append(
            f"{len(unknown)} of {len(costs.sizes)} models cannot be reached and are taken to have {assume.layers} "
            f"blocks of width {assume.width} (`assume`)."
        )
    estimates = [(cell, costs.of(cell)) for cell in cells]
    stored = [
        (cell, cost) for cell, cost in estimates if cost.reading or cell.kind in ABOUT["reads"]
    ]  # not attention
    reading = [(cell, cost.texts) for cell, cost in stored if cost.texts is not None]
    if guessed := sorted({str(cell.task) for cell, texts in reading if not texts.known}):
        notes.append(
            f"Nothing says how many texts {', '.join(guessed)} have: {assume.texts:,} to fit on and "
            f"{assume.held_out:,} held out are assumed (`assume`), as far as the study file sets no lower limit."
        )
    read = {
        (model.path, cell.task, split, getattr(texts, split)): (size, rows)
        for cell, texts in reading
        for rows in [1 if cell.options["data"].get("store_rows") == "texts" else assume.tokens]
        for split in ABOUT["reads"].get(cell.kind, TextSizes._fields[:3])
        for model, size in zip(cell.models, sizes_in(cell, costs.sizes), strict=True)
    }
    store = sum(
        FLOAT * (size.layers + 1) * size.width * texts * rows
        for (*_, texts), (size, rows) in read.items()
    )
    once = sum(size.reading(texts * assume.tokens) for (*_, texts), (size, _) in read.items())
    passes = len(read) + sum(cost.passes for _, cost in estimates if not cost.reading)
    return Plan(estimates, rate, solving, workers, float(store), round(passes), once, notes, rated)


def choose_banks(
    study: Study, options: CellOptions, sizes: Mapping[str, Size]
) -> tuple[Study, list[str]]:
    """Choose `fit.pairs_at_once`, how many pairs of models share a bank, where a study file leaves it out.

    It follows from widths, sites, maps and `fit.memory` alone, so that cells have the same ids on any machine.

    Args:
        study: the study.
        options: what the commands say of their options.
        sizes: of the models.

    Returns:
        The study with the number, and how it was chosen, in words.
    """
    if study.fit is None or study.fit.pairs_at_once is not None:
        return study, []
    single = replace(study, fit=replace(study.fit, pairs_at_once=1))
    costs = Costs(single, options, sizes)
    fits = {
        (cell.task, *sizes_in(cell, sizes)): cell
        for cell in expand(single, options)
        if cell.kind == "fit"
    }
    if len({size.width for cell in fits.values() for size in sizes_in(cell, sizes)}) != 1:
        return single, [
            "Each pair of models is fitted by itself, because their widths differ."
        ] if fits else []
    limit = study.fit.memory * 1e9
    pairs = [_pair(costs.load(cell)) for cell in fits.values()]
    most = max(1, min(pairs_within(limit, *pair) for pair in pairs))
    sites, a_site, model = max(pairs, key=lambda pair: pair[0] * pair[1])
    note = (
        f"A bank holds {most} pair{'s' if most > 1 else ''} of models within {in_words(limit)} (`fit.memory`): {sites} "
        f"sites of {in_words(a_site)}, and two models of {in_words(model)}. `fit.pairs_at_once` sets another number."
    )
    return replace(study, fit=replace(study.fit, pairs_at_once=most)), [note]


def _pair(load: Load) -> tuple[int, int, int]:
    """Sites of a fit, bytes that training one of them takes, and bytes of a model."""
    x, y = load.sizes
    data = load.parsed.data
    rows = most_rows(data.rows, data.batch_size, data.max_length)
    sites = len(parse_sites(data.sites, x.layers, y.layers))
    return (
        sites,
        bytes_a_site(load.made.model, x.width, y.width, rows),
        FLOAT * max(x.weights, y.weights),
    )
