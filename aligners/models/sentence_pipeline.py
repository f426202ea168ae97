"""Reads embedding models as sentence-transformers does: a Transformer, pooling, and the layers after it.

Nothing of that package is needed: a pipeline is a folder, or a name on the Hub, with `modules.json`, a config for each
module, and weights as safetensors. No code of a model is run, and no pickle is read.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoModel, PreTrainedConfig

from aligners.errors import UserError, check_known, check_range
from aligners.files.user_files import refusing
from aligners.models.loading.adapters import file_in, located
from aligners.models.loading.model_files import (
    quiet,
    read_config,
    read_tokenizer,
    read_weights,
)

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LENGTH = "sentence_bert_config.json"
ROLES = {"query": ("query",), "document": ("document", "passage", "corpus")}
AGAIN = "Save the pipeline again, or download it again."
VECTORS = "Give its vectors as a .npy or Parquet file instead."
# keys of configs that versions of the package before 6 wrote -> the modes of today, in the order of their parts
OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {
    "Identity": nn.Identity,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
}

# ---------------------------------------------------------------------- pooling


def _cls(states: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    first = mask.int().argmax(1)
    return states[torch.arange(len(states)), first]


def _max(states: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    hidden = mask[:, :, None] == 0
    return states.masked_fill(hidden, -torch.inf).amax(1)


def _mean(states: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    return _weighted(states, mask)


def _mean_sqrt_len(states: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    length = mask.sum(1, keepdim=True).clamp(min=1e-9)
    return _weighted(states, mask) * length.sqrt()


def _weighted_mean(states: Tensor, mask: Tensor, place: Tensor) -> Tensor:
    return _weighted(states, mask * place)


def _last_token(states: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    back = mask.flip(1).int().argmax(1)
    last = mask.shape[1] - 1 - back
    return states[torch.arange(len(states)), last]


def _weighted(states: Tensor, weights: Tensor) -> Tensor:
    """Return means of states (N, T, d) with weights (N, T), (N, d)."""
    total = weights.sum(1, keepdim=True).clamp(min=1e-9)
    return torch.einsum("ntd,nt->nd", states, weights) / total


POOLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last_token,
}


class Pooling(nn.Module):
    """Makes one vector of a text's states; several modes are put side by side.

    Args:
        modes: out of `POOLINGS`.
        include_prompt: whether the tokens of a prompt count.
    """

    def __init__(self, modes: Sequence[str], include_prompt: bool = True) -> None:
        super().__init__()
        check_known(POOLINGS, pooling_mode=list(modes))
        self.modes = list(modes)
        self.include_prompt = include_prompt

    def forward(self, states: Tensor, mask: Tensor, prompt: int = 0) -> Tensor:
        """Pool states (N, T, d) under a mask (N, T), padded on the right: (N, modes · d).

        Args:
            states: of the tokens.
            mask: 1 where there is a token.
            prompt: number of tokens at the beginning that belong to a prompt.
        """
        place = mask.cumsum(1).to(states.dtype)
        mask = mask.to(states.dtype)
        if prompt and not self.include_prompt:
            mask = mask.clone()
            mask[:, :prompt] = 0
        pooled = []
        for mode in self.modes:
            pooled.append(POOLINGS[mode](states, mask, place))
        return torch.cat(pooled, 1)


class Dense(nn.Module):
    """A linear layer with an activation, and the input added to it if `residual`."""

    def __init__(self, linear: nn.Linear, activation: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation
        self.residual: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(N, d_in) -> (N, d_out)."""
        out = self.activation(self.linear(x))
        if self.residual is not None:
            out = out + self.residual(x)
        return out


class Normalize(nn.Module):
    """Divides each vector by its length."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, d) -> (N, d)."""
        return normalize(x, dim=-1)


# ---------------------------------------------------------------------- the pipeline


class SentencePipeline:
    """An embedding model, as sentence-transformers reads it.

    A model without `modules.json` is pooled by the mean over tokens, as that package does; `assumed` then says so.

    Args:
        name: folder, or name on the Hub with `@REVISION` if need be.
        width: keep so many of the first numbers of each vector (Matryoshka); None: all.
        max_tokens: cut texts after so many tokens, if the model does not cut them earlier.
        prompts: role -> words before each text, in place of the model's own.
        device: where it runs.

    Attributes:
        assumed: what had to be assumed, as sentences.
        width: numbers of a vector.
        max_tokens: tokens after which a text is cut.
        normalised: whether the last layer gives vectors of length 1, and none of it is cut off.

    Raises:
        ValueError: there is no such model, a file of it is damaged, it has modules that are not known here, or fewer
            numbers than `width`.
    """

    def __init__(
        self,
        name: str,
        *,
        width: int | None = None,
        max_tokens: int | None = None,
        prompts: Mapping[str, str] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_range(least=1, width=width, max_tokens=max_tokens)
        self.name = name
        self.assumed: list[str] = []
        self.device = torch.device(device)
        self._place, where = located(name, {})
        self._where = {key: where[key] for key in ("revision",) if where.get(key)}
        self._prompts = _prompts_of(self._json(PROMPTS))
        self._prompts.update(prompts or {})
        modules = self._modules()
        self._read_transformer(modules[0].get("path", ""), max_tokens)
        self.pooling, self.layers = self._read_layers(modules[1:])
        whole = self._whole_width()
        if width is not None and width > whole:
            raise UserError(
                f"Expected `width` of at most {whole}, that of the vectors of {name}, but got {width}."
            )
        self.width = width or whole
        last = self.layers[-1] if self.layers else None
        self.normalised = isinstance(last, Normalize) and self.width == whole

    def prompt(self, role: str | None) -> str:
        """Return the words before each text of a role: `query`, `document`, or None for the model's default."""
        if role is None:
            return self._prompts.get(self._prompts.get("", "\0"), "")
        check_known(ROLES, role=role)
        for name in ROLES[role]:
            if name in self._prompts:
                return self._prompts[name]
        return ""

    def encode(
        self, texts: Sequence[str], role: str | None = None, *, batch_size: int = 32
    ) -> np.ndarray:
        """Embed texts, longest first in batches of like length: (N, width) float32, in the order of the texts.

        Args:
            texts: without prompts.
            role: see `prompt`.
            batch_size: texts at a time; changes the speed alone.

        Raises:
            ValueError: there is no text, or a vector is not finite.
        """
        vectors = np.empty((len(texts), self.width), np.float32)
        for places, found in self.batches(texts, role, batch_size=batch_size):
            vectors[places] = found
        return vectors

    def batches(
        self, texts: Sequence[str], role: str | None = None, *, batch_size: int = 32
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield places of texts and their vectors, a batch at a time; see `encode`."""
        check_range(least=1, batch_size=batch_size, texts=len(texts))
        before = self.prompt(role)
        prompt = self._prompt_tokens(before)
        encoded = self._tokens([before + text for text in texts])
        lengths = [len(ids) for ids in encoded["input_ids"]]
        order = sorted(range(len(texts)), key=lambda place: -lengths[place])
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            batch = {}
            for key, values in encoded.items():
                batch[key] = [values[place] for place in places]
            vectors = self._embed(batch, prompt)
            if not np.isfinite(vectors).all():
                raise UserError(
                    f"Expected finite vectors of {self.name}, but some are not. Its weights may overflow."
                )
            yield places, vectors

    def _tokens(self, texts: list[str]) -> Any:
        if self._lower_case:
            texts = [text.lower() for text in texts]
        return self.tokenizer(texts, truncation=True, max_length=self.max_tokens)

    def _prompt_tokens(self, prompt: str) -> int:
        """Return how many tokens a prompt takes at the beginning of a text, with special ones before it."""
        if not prompt or self.pooling.include_prompt:
            return 0
        ids = self._tokens([prompt])["input_ids"][0]
        return len(ids) - (ids[-1] in self.tokenizer.all_special_ids)

    @torch.inference_mode()
    def _embed(self, batch: dict[str, Any], prompt: int) -> np.ndarray:
        """Return vectors (n, width) of a batch of tokens."""
        padded = self.tokenizer.pad(batch, padding_side="right", return_tensors="pt")
        padded = padded.to(self.device)
        states = self.transformer(**padded)[0]
        vectors = self.pooling(states.float(), padded["attention_mask"], prompt)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors[:, : self.width].cpu().numpy()

    # ---- reading

    def _json(self, file: str) -> Any:
        """Return what a JSON file of the pipeline holds; an empty dictionary if there is none."""
        path = file_in(self._place, file, self._where)
        if path is None:
            return {}
        with refusing(f"{file} of {self.name} cannot be read", AGAIN):
            return json.loads(Path(path).read_text(encoding="utf-8"))

    def _modules(self) -> list[dict[str, Any]]:
        """Return the entries of `modules.json`, each with its `kind`; the mean over tokens where there is no file."""
        entries = self._json(MODULES)
        if not entries:
            self.assumed.append(
                f"{self.name} has no {MODULES}: its vectors are taken as the mean over tokens, not normalised."
            )
            return [{"path": ""}, {"kind": "Pooling", "path": None}]
        with refusing(f"{MODULES} of {self.name} cannot be read", AGAIN):
            modules = []
            for entry in sorted(entries, key=lambda entry: entry["idx"]):
                kind = entry["type"].rpartition(".")[2]
                modules.append({"kind": kind, "path": entry["path"]})
        if modules[0]["kind"] != "Transformer":
            raise UserError(
                f"Expected {self.name} to begin with a Transformer, but got {modules[0]['kind']}. {VECTORS}"
            )
        return modules

    def _read_transformer(self, path: str, max_tokens: int | None) -> None:
        name = "/".join(filter(None, [self._place, path]))
        if self._where and not path:
            name = self.name
        length = self._json("/".join(filter(None, [path, LENGTH])))
        self._lower_case = bool(length.get("do_lower_case"))
        config = self._read_weights(name)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self._hidden = config.get_text_config().hidden_size
        limits = [max_tokens, *self._limits(config, length.get("max_seq_length"))]
        known = [limit for limit in limits if limit is not None and limit > 0]
        self.max_tokens = min(known)

    def _read_weights(self, name: str) -> PreTrainedConfig:
        """Read the tokenizer and the transformer, all of whose weights must be there, and return its config."""
        with quiet():
            config = read_config(name, dict(self._where))
            self.tokenizer = read_tokenizer(name, dict(self._where), config)
            options = {**self._where, "config": config, "dtype": torch.float32}
            model, random = read_weights(name, AutoModel, options)
        random = [weight for weight in random if "pooler" not in weight]
        if random:
            raise UserError(
                f"Expected all weights in the model {name}, but {', '.join(random[:4])} are missing. {AGAIN}"
            )
        self.transformer: nn.Module = model.eval().requires_grad_(False)
        self.transformer.to(self.device)
        return config

    def _limits(self, config: PreTrainedConfig, given: int | None) -> list[int | None]:
        """Return the most tokens of a text: as the pipeline gives it, or else as its tokenizer and positions allow."""
        if given is not None:
            return [given]
        positions = getattr(config, "max_position_embeddings", None)
        return [self.tokenizer.model_max_length, positions]

    def _read_layers(
        self, modules: Sequence[Mapping[str, Any]]
    ) -> tuple[Pooling, list[nn.Module]]:
        """Return the pooling, and the layers after it."""
        pooling = None
        layers: list[nn.Module] = []
        for module in modules:
            kind, path = module["kind"], module["path"]
            config = self._json(f"{path}/config.json") if path else {}
            what = f"The {kind} of {self.name} cannot be read"
            with refusing(what, AGAIN):
                if kind == "Pooling":
                    pooling = _pooling(config)
                elif kind == "Dense":
                    layers.append(self._dense(path, config))
                elif kind == "Normalize":
                    layers.append(Normalize())
                elif kind != "Dropout":
                    raise UserError(
                        f"Expected modules out of Transformer, Pooling, Dense, Normalize and Dropout in {self.name}, "
                        f"but got {kind}. {VECTORS}"
                    )
        if pooling is None:
            raise UserError(
                f"Expected a Pooling among the modules of {self.name}, but there is none."
            )
        return pooling, [layer.to(self.device) for layer in layers]

    def _dense(self, path: str, config: Mapping[str, Any]) -> Dense:
        name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
        activation = name.rpartition(".")[2]
        check_known(ACTIVATIONS, activation_function=activation)
        d_in, d_out = config["in_features"], config["out_features"]
        linear = nn.Linear(d_in, d_out, bias=config.get("bias", True))
        layer = Dense(linear, ACTIVATIONS[activation]())
        if config.get("use_residual"):
            layer.residual = nn.Identity()
            if d_in != d_out:
                layer.residual = nn.Linear(d_in, d_out, bias=False)
        file = file_in(self._place, f"{path}/model.safetensors", self._where)
        if file is None:
            raise UserError(
                f"Expected {path}/model.safetensors in {self.name}, but there is none: only safetensors are read."
            )
        layer.load_state_dict(load_file(file))
        return layer.requires_grad_(False).eval()

    def _whole_width(self) -> int:
        """Return the width of vectors before any of it is cut off."""
        for layer in reversed(self.layers):
            if isinstance(layer, Dense):
                return layer.linear.out_features
        return self._hidden * len(self.pooling.modes)


def _prompts_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> prompt of a pipeline's config; an empty name leads to the name of the default."""
    prompts = {}
    for name, words in (config.get("prompts") or {}).items():
        if words is not None:
            prompts[name] = words
    default = config.get("default_prompt_name")
    if default:
        prompts[""] = default
    return prompts


def _pooling(config: Mapping[str, Any]) -> Pooling:
    """Make a Pooling from its config, of any version."""
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in OLD_MODES.items() if config.get(key)]
    if isinstance(modes, str):
        modes = [modes]
    return Pooling(modes or ["mean"], config.get("include_prompt", True))
