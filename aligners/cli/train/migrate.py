"""`train.py migrate`: an index that survives its model."""

from collections.abc import Sequence
from pathlib import Path

import torch

from aligners.cli.command import Run, command
from aligners.errors import UserError
from aligners.fitting.migration.map_files import not_in_numpy, save_map
from aligners.fitting.migration.migration import Migration
from aligners.fitting.migration.search import Similarity
from aligners.fitting.migration.serving import check_outputs, count, map_index
from aligners.fitting.migration.text_rows import read_judged, read_texts
from aligners.fitting.migration.vector_maps import DEFAULT
from aligners.fitting.migration.vector_sources import VectorSource
from aligners.reports.publishing import publish_alone

WHAT = {
    "queries": "new queries to the old index",
    "documents": "old documents to the new space",
}
PAIRS = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


@command("migration")
def migrate(
    run: Run,
    old: str | None = None,
    new: str | None = None,
    texts: Path | None = None,
    queries: Path | None = None,
    maps: Sequence[str] = DEFAULT,
    pairs: Sequence[int] = PAIRS,
    held_out_domains: Sequence[str] = (),
    index: Path | None = None,
    outputs: Sequence[str] = ("npy",),
    similarity: Similarity = "cosine",
    prompts_old: dict[str, str] | None = None,
    prompts_new: dict[str, str] | None = None,
    max_tokens: int | None = None,
    batch_size: int = 32,
    least_recall: float | None = None,
    index_size: int | None = None,
    price_per_hour: float | None = None,
    seed: int = 0,
) -> None:
    """Say whether an index of old vectors can serve a new embedding model through a map, and map it.

    Maps are fitted on pairs, the old and the new vector of a text. They lead new queries to the old index, or old
    documents to the new space. The report has recall@1, recall@10 and nDCG@10 by the number of pairs, beside
    re-embedding and doing nothing, what was predicted from the pairs alone, and what re-embedding takes.

    Example: `--old models/old --new models/new --texts texts.jsonl --queries beir --run runs/migration`

    Args:
        run: of the command.
        old: Model of the index, or its vectors. A model is a folder or a name on the Hub, in sentence-transformers'
            files; NAME:width=256 keeps the first 256 numbers. Vectors are a .npy or Parquet file, row by row those of
            the texts (by id where both have ids), or a folder with texts.npy and, for judged queries, corpus.npy and
            queries.npy, or .parquet.
        new: Model that takes its place, or its vectors.
        texts: File of some thousand texts that maps are fitted on: a line each, or JSON lines, CSV or TSV with
            `text`, and `_id` and `domain` if known.
        queries: Folder of judged queries, as BEIR has them (queries.jsonl, corpus.jsonl, qrels.tsv). Pieces of the
            texts are then embedded as queries, too, to fit maps on and choose them by. Default: held-out texts are
            queries, and what re-embedding finds counts as relevant.
        maps: Maps to fit, of which validation pairs choose one: procrustes, scaled_procrustes, linear, ridge, mlp, inn.
        pairs: Numbers of pairs to fit on, besides all.
        held_out_domains: Domains that no map is fitted on.
        index: A .npy or Parquet file of old vectors, which is mapped to mapped.npy. It may be larger than memory.
        outputs: What is written, out of npy, parquet and faiss (the mapped index) and onnx (the maps).
        similarity: What the index sorts by: cosine, or dot.
        prompts_old: The old model's prompts, in place of its own: a `query` and a `document`.
        prompts_new: The new model's prompts, likewise; for E5 '{query: "query: ", document: "passage: "}'.
        max_tokens: Tokens after which both models cut texts. Default: their own.
        batch_size: Texts to embed at a time.
        least_recall: Relative recall@10 that is asked for. Below it, the report advises against the map. Default: 0.97
            for models of one architecture, width and vocabulary, else 0.9.
        index_size: Documents of the whole index. The time of re-embedding is said of it. Default: those of `index`,
            or the documents searched here.
        price_per_hour: Price of an hour of embedding.
        seed: Of the division of texts, and of draws.
    """
    given = {"old": old, "new": new, "texts": texts}
    for name, value in given.items():
        if value is None:
            raise UserError(f"Expected `{name}`, but got none.")
    check_outputs(list(outputs))
    rows = read_texts(Path(str(texts)))
    judged = read_judged(queries) if queries is not None else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sources = []
    for place, prompts in ((old, prompts_old), (new, prompts_new)):
        source = VectorSource(
            str(place),
            prompts=prompts,
            max_tokens=max_tokens,
            batch_size=batch_size,
            device=device,
        )
        sources.append(source)
    before, after = sources
    study = Migration(
        before,
        after,
        rows,
        judged,
        maps=maps,
        pairs=pairs,
        held_out=held_out_domains,
        similarity=similarity,
        least=least_recall,
        index_size=index_size or (count(index) if index is not None else None),
        price=price_per_hour,
        seed=seed,
    )
    run.claim()
    study.run(run.folder / "vectors")
    for route, fitted in study.chosen.items():
        what = WHAT[route]
        save_map(fitted, run.folder / "maps" / route, what, onnx="onnx" in outputs)
    chosen = {route: fitted.name for route, fitted in study.chosen.items()}
    study.meta["serving"] = not_in_numpy(chosen, "onnx" in outputs)
    if index is not None:
        fitted = study.chosen["documents"]
        map_index(fitted, index, run.folder, list(outputs), similarity=similarity)
    publish_alone(study, "migration", run.folder, device)
