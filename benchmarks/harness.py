"""What all benchmarks share: arguments, interleaved timing, figures with their bars, a JSON file.

`python -m benchmarks.harness FILE.json COMMAND` prints the figures of such a file as the Markdown that is committed in
`benchmarks/results/`; COMMAND is the one that wrote the file.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = [
    "Figures",
    "interleaved",
    "machine",
    "markdown",
    "parser",
    "parser_with_sizes",
    "ratio",
    "write_whole",
]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments every benchmark takes: `--json`, `--device`, `--threads`, `--rounds`."""
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    arguments.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there too"
    )
    arguments.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    arguments.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="CPU threads of torch",
    )
    arguments.add_argument(
        "--rounds", type=int, default=15, help="times that each alternative is timed"
    )
    return arguments


def parser_with_sizes(
    description: str | None, *, layers: int, batch: int, tokens: int = 64
) -> argparse.ArgumentParser:
    """Those of `parser`, and the sizes of random models and of a batch, with these defaults."""
    arguments = parser(description)
    for name, size in {
        "width": 256,
        "layers": layers,
        "batch": batch,
        "tokens": tokens,
    }.items():
        arguments.add_argument(f"--{name}", type=int, default=size)
    return arguments


def interleaved(
    alternatives: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: str,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each alternative in each round.

    A round runs every alternative once, each time beginning with another one, so that what the machine does
    besides hits all of them alike. Where it does much, `clock` can be `time.process_time`, the time of processors.
    """
    for _ in range(warmup):
        for run in alternatives.values():
            run()
    names = list(alternatives)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            _synchronise(device)
            start = clock()
            alternatives[name]()
            _synchronise(device)
            seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, reference: str) -> float:
    """Median over the rounds of one alternative's time in units of another's in the same round."""
    return statistics.median(
        a / b for a, b in zip(seconds[name], seconds[reference], strict=True)
    )


def is_met(value: float, bar: float, sense: str) -> bool:
    """Tell whether a value is on the side of its bar that `sense` names."""
    return value <= bar if sense == "<=" else value >= bar


class Figures:
    """The numbers of one benchmark, printed as they come and written whole at the end.

    Args:
        device: where the benchmark runs.

    Attributes:
        figures: by name, the value, its bar or None, and on which side of the bar it should be.
        missed: names of those that miss their bars.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.figures: dict[str, dict[str, float | str | None]] = {}
        self.missed: list[str] = []

    def add(
        self, name: str, value: float, *, bar: float | None = None, sense: str = "<="
    ) -> None:
        """Record and print a number; `sense` says on which side of its bar it should be: "<=" or ">="."""
        self.figures[name] = {"value": value, "bar": bar, "sense": sense}
        verdict = ""
        if bar is not None:
            met = is_met(value, bar, sense)
            self.missed += [] if met else [name]
            verdict = f"   {sense} {bar:g}: {'met' if met else 'MISSED'}"
        print(f"{name:<48} {value:>10.4g}{verdict}", flush=True)

    def add_times(self, seconds: Mapping[str, list[float]]) -> None:
        """Record and print the median seconds of every alternative."""
        for name, values in seconds.items():
            self.add(f"{name}, seconds", statistics.median(values))

    def write(self, path: Path | None) -> None:
        """Write `{"machine": ..., "figures": ...}`, whole or not at all; nothing without a path."""
        if path is not None:
            write_whole(
                path, {"machine": machine(self._device), "figures": self.figures}
            )


def write_whole(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(content, indent=2))
    unfinished.replace(path)


def markdown(title: str, command: str, record: Mapping[str, Any]) -> str:
    """The figures of a JSON file as Markdown: a line that says how they were made, and a table with their bars.

    Args:
        title: of the page.
        command: that wrote the file.
        record: the content of the file, from `Figures.write` or `benchmarks.on_gpu`.
    """
    about = _in_words(record["machine"])
    lines = [f"# {title}", "", f"Command: `{command}`. Machine: {about}."]
    parts = record.get("parts") or {"": record}
    for name, part in parts.items():
        if name:
            lines += ["", f"## {name}"]
        if "why" in part:
            lines += ["", f"{part['status'].capitalize()}: {part['why']}."]
        lines += _table(part.get("figures", {}))
    return "\n".join(lines) + "\n"


def _table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of a table, which say what misses its bar; none without figures."""
    if not figures:
        return []
    lines = ["", "| | value | bar |", "|---|---|---|"]
    for name, found in figures.items():
        value, bar, sense = found["value"], found["bar"], found["sense"]
        side = ""
        if bar is not None:
            side = f"{sense} {bar:g}"
            if not is_met(value, bar, sense):
                side += ", missed"
        lines.append(f"| {name} | {value:.5g} | {side} |")
    return lines


def _in_words(about: Mapping[str, Any]) -> str:
    """Names and values, those of a mapping within in parentheses; what is None is left out."""
    words = []
    for name, value in about.items():
        if isinstance(value, Mapping):
            words.append(f"{name} ({_in_words(value)})")
        elif isinstance(value, list):
            words.append(f"{name} {'.'.join(map(str, value))}")
        elif value is not None:
            words.append(f"{name} {value}")
    return ", ".join(words)


def machine(device: str) -> dict[str, str | int]:
    """The machine and the versions with which figures were taken."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    """The processor's name, which `platform` leaves empty on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = [
        line.partition(":")[2].strip()
        for line in names
        if line.startswith("model name")
    ]
    return named[0] if named else platform.processor()


def _synchronise(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("file", type=Path, help="what --json wrote")
    arguments.add_argument("command", help="that wrote it")
    given = arguments.parse_args()
    record = json.loads(given.file.read_text(encoding="utf-8"))
    print(markdown(given.file.stem, given.command, record), end="")


if __name__ == "__main__":
    _main()
