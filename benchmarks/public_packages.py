"""Our measures beside those of public packages, on the ten data sets of the tests.

    python -m benchmarks.public_packages --platonic_rep FOLDER --resi FOLDER --netrep FOLDER

Each folder is a checkout of minyoungg/platonic-rep, mklabunde/resi or ahwillia/netrep; what is not given is left out.
Their functions are imported file by file, without what else the packages import, and get rows in double precision;
platonic-rep gets rows of length 1, as its program normalises them. Of a data set with layers, the first of each side.
Where a package has a distance, ours is the same distance.
"""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aligners import api
from benchmarks.harness import machine, parser, write_whole
from tests.rows import TEN, data_set

Rows = NDArray[np.float64]
Function = Callable[[Rows, Rows], float]
K = 10


def neighbours(rows: Rows) -> int:
    """As many as there can be, up to `K`."""
    return min(K, len(rows) - 2)


def unit(rows: Rows) -> torch.Tensor:
    """Rows of length 1."""
    return torch.from_numpy(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def bare(name: str, folder: Path) -> None:
    """Let the modules of a package be imported without what its `__init__` imports."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def of_platonic_rep(folder: Path) -> Iterator[tuple[str, Function, Function]]:
    """Name, our function and theirs."""
    for name in ("torchaudio", "torchaudio.functional"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.path.insert(0, str(folder))
    theirs: Any = import_module("metrics").AlignmentMetrics

    def near(measure: Callable[..., Any]) -> Function:
        return lambda x, y: measure(unit(x), unit(y), topk=neighbours(x))

    yield (
        "mutual_knn",
        lambda x, y: api.mutual_knn(x, y, k=neighbours(x)),
        near(theirs.mutual_knn),
    )
    yield ("cknna", lambda x, y: api.cknna(x, y, k=neighbours(x)), near(theirs.cknna))
    yield (
        "unbiased_cka of unit rows",
        lambda x, y: api.unbiased_cka(unit(x).numpy(), unit(y).numpy()),
        lambda x, y: theirs.unbiased_cka(unit(x), unit(y)),
    )
    yield (
        "cka of unit rows",
        lambda x, y: api.cka(unit(x).numpy(), unit(y).numpy()),
        lambda x, y: theirs.cka(unit(x), unit(y)),
    )


def of_resi(folder: Path) -> Iterator[tuple[str, Function, Function]]:
    """Name, our function and theirs."""
    bare("repsim", folder / "repsim")
    bare("repsim.measures", folder / "repsim" / "measures")

    def theirs(module: str, name: str, **options: Any) -> Function:
        found = getattr(import_module(f"repsim.measures.{module}"), name)
        return lambda x, y: float(found(x, y, "nd", **options))

    jaccard = import_module("repsim.measures.nearest_neighbor").jaccard_similarity
    yield (
        "jaccard_knn",
        lambda x, y: api.jaccard_knn(x, y, k=neighbours(x)),
        lambda x, y: jaccard(x, y, "nd", k=neighbours(x), n_jobs=1),
    )
    yield "cka", api.cka, theirs("cka", "centered_kernel_alignment")
    yield (
        "rsa_spearman, euclidean",
        lambda x, y: api.rsa_spearman(x, y, kernel="euclidean"),
        theirs("rsa", "representational_similarity_analysis", inner="euclidean"),
    )
    yield (
        "angular_shape_distance",
        api.angular_shape_distance,
        theirs("procrustes", "orthogonal_angular_shape_metric_centered"),
    )
    yield (
        "procrustes_distance",
        api.procrustes_distance,
        theirs("procrustes", "orthogonal_procrustes_centered_and_normalized"),
    )
    yield (
        "hard_matching",
        api.hard_matching,
        theirs("correlation_match", "hard_correlation_match"),
    )
    yield "r2", api.r2, theirs("linear_regression", "linear_reg")


def of_netrep(folder: Path) -> Iterator[tuple[str, Function, Function]]:
    """Name, our function and theirs."""
    bare("netrep", folder / "netrep")
    bare("netrep.metrics", folder / "netrep" / "metrics")
    linear: Any = import_module("netrep.metrics.linear").LinearMetric
    for name in ("angular", "euclidean"):
        ours = api.angular_shape_distance
        if name == "euclidean":
            ours = unscaled

        def theirs(x: Rows, y: Rows, name: str = name) -> float:
            return float(linear(alpha=1, score_method=name).fit_score(x, y))

        yield f"shape distance, {name}", ours, theirs


def unscaled(x: Rows, y: Rows) -> float:
    """The Procrustes distance in the units of the rows."""
    return api.procrustes_distance(x, y, scaled=False)


PACKAGES = {"platonic_rep": of_platonic_rep, "resi": of_resi, "netrep": of_netrep}


def attempted(function: Function, x: Rows, y: Rows) -> str:
    """A figure, or the kind of its refusal."""
    try:
        return f"{float(function(x, y)):.6f}"
    except (ValueError, ArithmeticError, np.linalg.LinAlgError) as error:
        return type(error).__name__


def main() -> None:
    """Print a line for each package, measure and data set."""
    given = parser(__doc__)
    for name in PACKAGES:
        given.add_argument(f"--{name}", type=Path, metavar="FOLDER")
    options = given.parse_args()
    torch.set_num_threads(options.threads)
    lines = []
    print("| package | measure | data set | ours | theirs |\n|---|---|---|---|---|")
    for package, functions in PACKAGES.items():
        folder = getattr(options, package)
        if folder is None:
            continue
        for name, ours, theirs in functions(folder):
            for case in TEN:
                x, y = (side[0].double().numpy() for side in data_set(case))
                figures = [attempted(ours, x, y), attempted(theirs, x, y)]
                lines.append([package, name, case, *figures])
                print(f"| {' | '.join(lines[-1])} |", flush=True)
    if options.json is not None:
        write_whole(options.json, {"machine": machine(options.device), "lines": lines})


if __name__ == "__main__":
    main()
