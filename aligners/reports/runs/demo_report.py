"""The summary at the end of the demo, in plain words with its own numbers."""

from collections.abc import Mapping, Sequence

from aligners.fitting.training_status import MARK, is_trained, what_did_not_train
from aligners.reports.names import span
from aligners.reports.report import Row, grouped, is_known

LINES = {
    "identity": "not mapped",
    "permutation": "neurons matched: permutation",
    "procrustes": "rotated: Procrustes",
    "linear": "mapped linearly",
    "mlp": "by a free network: MLP",
    "inn": "by an invertible network: INN",
}


def demo_words(language: Sequence[Row], classifiers: Sequence[Row] = ()) -> list[str]:
    """Say in a few lines what was found.

    Args:
        language: rows of the report of the two language models.
        classifiers: rows of that of the two classifiers, if there are any.
    """
    methods = grouped(language, "method")
    said = [
        "Two language models that differ only in their seed. By itself, the second has",
        f"a loss of {methods['native_y'][0]['loss']:.2f} nats a token. With the first's states, mapped, after a block:",
        " " * 32 + "loss higher by    FVU on token types",
        " " * 32 + "(nats a token)    fitted on      never seen",
    ]
    for name, label in LINES.items():
        penalty = _span(methods, name, "penalty", ".2f")
        seen = _span(methods, name, "fvu_seen", ".2f")
        unseen = _span(methods, name, "fvu_unseen", ".2f")
        said.append(f"  {label:<30}{penalty:<18}{seen:<15}{unseen}")
    said.append(
        "FVU: fraction of variance left unexplained. 0 is exact, 1 no better than the mean."
    )
    if classifiers:
        of = grouped(classifiers, "method")
        right = f"{of['native_y'][0]['accuracy']:.0%}"
        bare = _span(of, "identity", "accuracy", ".0%")
        mapped = _span(of, "linear", "accuracy", ".0%")
        said += [
            f"A classifier classifies {right} of the texts correctly by itself, {bare} with",
            f"another's states as they are, and {mapped} with them mapped linearly.",
        ]
    return said + what_did_not_train(methods.get("mlp", []) + methods.get("inn", []))


def _span(
    methods: Mapping[str, Sequence[Row]], name: str, column: str, form: str
) -> str:
    """Return the least and the largest value of a method over sites, marked if it is not trained at one of them."""
    rows = methods.get(name, [])
    text = span(rows, column, form) if is_known(rows, column) else "not known"
    return text if all(map(is_trained, rows)) else text + MARK
