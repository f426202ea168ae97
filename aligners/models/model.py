"""A pretrained model that never trains: its sites, its front up to a site, its tail from a site."""

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from aligners.errors import UserError
from aligners.models.architectures import Component, Task, architecture_of, first_site
from aligners.models.calling import Caller, Layout
from aligners.models.causality import is_causal, ordinary_tokens, rounding
from aligners.models.classifiers import drawn, outside, with_head
from aligners.models.hooks import Places, blocks_of, inject, read, reserved_positions
from aligners.models.loading.placement import check_placement, is_sharded, place_like
from aligners.models.model_identity import (
    code_not_run,
    code_of,
    implementation_of,
    preferred_implementation,
    settings_of,
)

Inputs = Mapping[str, Tensor]  # what a tokenizer makes


class FrozenModel:
    """A Transformer of `transformers` with its states open to reading and replacing.

    Sites are 0..L: 0 is the input of block 1, l the output of block l, before any final norm; and L + 1, the output of
    the final norm, which the head reads, where there is one (`last_site`). These are states of the residual stream;
    with `component` "attention" or "mlp", site l in 1..L is what that sub-layer of block l adds to the stream: its
    output before the addition and before any norm that follows the addition.

    `inputs` are what a tokenizer makes: `input_ids` (B, T), `attention_mask` (B, T), perhaps `token_type_ids`
    (B, T), padded on either side, on any device; what comes out is in the same layout and where `input_ids` are.
    Token types are left out for a model that has none.

    It is deliberately not an `nn.Module`: a module that holds one does not train it, put it into train mode, or save
    its weights.

    Args:
        model: the model; put into eval mode and frozen in place.
        tokenizer: its tokenizer, if there is one.
        name: Hub id or folder, for reports and checkpoints.
        revision: revision on the Hub.

    Attributes:
        depth: L, the number of blocks.
        last_site: L + 1, the output of the final norm, or L where there is no final norm.
        width: d, the width of the states.
        vocabulary: tokens that it has embeddings for; its tokenizer may know more.
        blocks: the L blocks in the order of execution.
        task: what the head answers: "classification" (B, C); "masked" or "causal", a token for each position
            or for the next, (B, T, V); None: there is no head, or none that is asked: see `unasked`.
        n_labels: C, the size of the classification head; None if there is none, or none that is asked.
        regression: whether that head predicts a number instead of a class.
        class_map: for each class of the texts, the head's classes that stand for it; None: those of the same numbers.
            `aligners.injection.scoring.task_scores.match_heads` alone sets it: logits are always the head's own.
        causal: whether a position sees only those before it, by a test of the model itself: see `is_causal`.
        heads: attention heads of each block; 0 if it has none.
        max_length: the most tokens that the model has positions for; None: no limit.
        config: the model's.
        nbytes: bytes of its weights.
        dtype: data type of the weights.
        attention_used: the implementation of attention, such as `sdpa`.
        attention_preferred: the one that transformers chooses where nothing is said.
        code: a hash of the model's own code; None: transformers has it.
        sharded: whether a `device_map` has placed the weights, and keeps them there.
        cautions: why figures of the model are doubtful, each a sentence that begins with "Caution: ".
        quantised: method by which the weights are quantised, or None. Gradients may not pass through quantised weights.

    Raises:
        ValueError: if the architecture is not registered or its entry does not hold for this config, or if a
            causal classifier has no padding token, a block is split between devices, or weights are not there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str,
        revision: str | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.cautions = code_not_run(model, tokenizer, name)
        self.architecture = architecture_of(model.config.model_type)
        self.blocks = blocks_of(model)
        self.depth = len(self.blocks)
        self.last_site = self.blocks.last_site
        self._check_placement()
        self._caller = Caller(model)
        self._note_sizes(model)
        self._note_precision(model)
        self._note_head(model)

    def _note_sizes(self, model: PreTrainedModel) -> None:
        """Set what the shapes of the model and its config say."""
        settings = self.architecture.settings_of(model.config)
        self.width = int(settings.hidden_size)
        self.heads = int(getattr(settings, "num_attention_heads", None) or 0)
        embeddings: Any = model.get_input_embeddings()
        self.vocabulary = len(embeddings.weight)
        self.max_length: int | None = None
        positions = getattr(settings, "max_position_embeddings", None)
        if positions and positions > 0:  # XLNet says -1 for no limit
            self.max_length = int(positions) - reserved_positions(model)

    def _note_precision(self, model: PreTrainedModel) -> None:
        """Set what decides how the model rounds, and whose code computes it."""
        self.dtype = model.dtype
        self.nbytes = 0
        for weight in model.parameters():
            for _, part in _parts("", weight):
                self.nbytes += part.nbytes
        # A Mamba's blocks pass on float32, whatever its weights are.
        settings = self.architecture.settings_of(model.config)
        in_float32 = getattr(settings, "residual_in_fp32", False)
        self._passed = torch.float32 if in_float32 else self.dtype
        self.sharded = is_sharded(model)
        self.quantised = quantisation(model.config)
        self.attention_used = implementation_of(model)
        self.attention_preferred = preferred_implementation(model)
        self.code = code_of(model)

    def _note_head(self, model: PreTrainedModel) -> None:
        """Set what the head answers.

        Raises:
            ValueError: a classifier that reads the last token that is not padding has no padding token.
        """
        self._head: Task | None = self._caller.task
        self.n_labels: int | None = None
        if self._head == "classification" and _not_scored(model.config) is None:
            self.n_labels = model.config.num_labels
        self.regression = self.n_labels == 1
        self.class_map: tuple[tuple[int, ...], ...] | None = None
        settings = self.architecture.settings_of(model.config)
        if self._caller.reads_last_token and settings.pad_token_id is None:
            raise UserError(
                f"Expected a `pad_token_id` in the config of {self.name}, but got none: a {type(model).__name__} "
                "reads the last token that is not padding. Set it to the padding token of its tokenizer."
            )

    @cached_property
    def causal(self) -> bool:
        """Whether a position sees only those before it; tested once, on first use."""
        embeddings: Any = self.model.get_input_embeddings()
        tokens = ordinary_tokens(len(embeddings.weight), self.config, self.tokenizer)
        tolerance = rounding(self.dtype, self.quantised is not None)
        return is_causal(self._last_states, tokens, self.max_length, tolerance)

    @property
    def unasked(self) -> str | None:
        """Why the head cannot be used, as the end of a sentence that begins with the model's name; None: it can."""
        if self._head == "classification":
            return _not_scored(self.config)
        if self._head == "causal" and not self.causal:
            return (
                "predicts the next token and sees it already: when the last token of a text changes, the states "
                "before it move"
            )
        return None

    @property
    def no_task(self) -> str:
        """Why the model has no task, as the end of a sentence that begins with its name."""
        if self.unasked:
            return self.unasked
        return "has no classification head and none for language modelling"

    @property
    def task(self) -> Task | None:
        """What the head predicts; None if it cannot be used."""
        return None if self.unasked else self._head

    @property
    def sizes(self) -> dict[str, int | None]:
        """Blocks, width of the states, heads, width of a head, and how much of it rotates with the position."""
        settings = self.architecture.settings_of(self.config)
        head_width = getattr(settings, "head_dim", None)
        if not head_width:
            head_width = self.width // max(self.heads, 1)
        rotary: Any = getattr(settings, "rope_parameters", None)
        rotary_width = None
        if rotary is not None:
            rotary_width = int(head_width * rotary.get("partial_rotary_factor", 1))
        return {
            "layers": self.depth,
            "width": self.width,
            "heads": self.heads,
            "head_width": int(head_width),
            "rotary_width": rotary_width,
        }

    @property
    def device(self) -> torch.device:
        """The device of the inputs: that of the weights or, if they are sharded, of the embeddings."""
        return self._caller.device

    @property
    def label_names(self) -> list[str]:
        """The config's names of the head's classes, by number; LABEL_0, LABEL_1, ... where it has none."""
        known: Any = self.config.id2label or {}
        return [str(known.get(k, f"LABEL_{k}")) for k in range(self.n_labels or 0)]

    def to(self, device: torch.device | str) -> Self:
        """Move the weights.

        Raises:
            ValueError: they are sharded.
        """
        if self.sharded:
            raise UserError(
                f"Expected a model on one device to move to `device` {device}, but got {self.name}, which a "
                "`device_map` keeps where it is. Leave it there: inputs and states are taken from any device."
            )
        self.model.to(device)
        return self

    @cached_property
    def fingerprint(self) -> str:
        """Hash of names, dtypes, shapes and bytes of all weights; read once, at first use."""
        digest = hashlib.blake2b(digest_size=16)
        for whole, parts in sorted(self.model.state_dict().items()):
            for name, weight in _parts(whole, parts):
                digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
                values = weight.cpu().contiguous().flatten()
                digest.update(values.view(torch.uint8).numpy())
        if getattr(self.model, "peft_config", None):  # an adapter that is not merged
            for name, layer in self.model.named_modules():
                scaling = getattr(layer, "scaling", None)
                if scaling:
                    digest.update(f"{name} {scaling}\n".encode())
        return digest.hexdigest()

    def identity(self) -> dict[str, Any]:
        """What a checkpoint records of a model: all that decides what it computes, and its name.

        Returns:
            Its name, revision and fingerprint; `settings` of its config; `attention`, the implementation, which rounds;
            and `code`, a hash of code of its own, or None.
        """
        return {
            "name": self.name,
            "revision": self.revision,
            "fingerprint": self.fingerprint,
            "settings": settings_of(self.config),
            "attention": self.attention_used,
            "code": self.code,
        }

    def logits(self, inputs: Inputs) -> Tensor:
        """Run the whole model: (B, C), or (B, T, V) for a language modelling head.

        Raises:
            ValueError: if the model has no head, or an input that it does not know.
        """
        self._check_answers()
        return self._caller.logits(inputs, self._layout(inputs))

    def front(
        self, inputs: Inputs, sites: Sequence[int], component: Component = "residual"
    ) -> list[Tensor]:
        """Return the states at `sites`, each (B, T, d), in the given order. Nothing above the deepest site is run.

        Raises:
            ValueError: if a site is outside 0..L (1..L of a sub-layer), an input is unknown to the model, or the
                component to its architecture.
        """
        if not sites:
            return []
        states, _, _ = self._run_trunk(inputs, sites, component)
        return states

    def attention(
        self,
        inputs: Inputs,
        sites: Sequence[int] = (),
        component: Component = "residual",
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the attention weights of all blocks, and the states at `sites`, from one forward pass.

        `transformers` records the weights with hooks of its own, which stay in the model after the first use,
        as they do after any `output_attentions=True`; they do nothing otherwise.

        Returns:
            For each block 1..L the weights (B, H, T, T): from the token of the third axis to that of the
            fourth. The row of a real token sums to one over the text's tokens and is zero at padding. And the
            states, as from `front`.

        Raises:
            ValueError: if the model was not loaded with eager attention or hands out no weights, or as in `front`.
        """
        implementation = implementation_of(self.model)
        if implementation != "eager":
            raise UserError(
                f'Expected a model with `attn_implementation` "eager", but got {self.name} with {implementation!r}, '
                'which never forms the attention weights. Load it with attn_implementation="eager".'
            )
        states, (output,), layout = self._run_trunk(
            inputs, sites, component, output_attentions=True, return_dict=True
        )
        weights = getattr(output, "attentions", None) or ()
        if len(weights) != self.depth:
            raise UserError(
                f"Expected the attention weights of {self.depth} blocks, but got those of {len(weights)} from "
                f"{self.name}, a {type(self.model).__name__}: it does not hand them out. Compare its states instead."
            )
        return [_turn_both_back(matrix, layout) for matrix in weights], states

    def _run_trunk(
        self, inputs: Inputs, sites: Sequence[int], component: Component, **options: Any
    ) -> tuple[list[Tensor], list[Any], Layout]:
        """Run the trunk; return the states at `sites`, its output, and the layout of the batch.

        Without options nothing above the deepest site is run, and there is no output.
        """
        places = self._places(component)
        for site in sites:
            self.check_site(site, "sites", component)
        layout = self._layout(inputs)
        trunk = self._caller.trunk
        arguments = self._caller.arguments(trunk, inputs, layout) | options
        outputs: list[Any] = []

        def run() -> None:
            outputs.append(trunk(**arguments))

        raw = read(places, sites, run, leave=not options)
        states = {}
        for site, state in raw.items():
            states[site] = self._outward(state, inputs, layout)
        return [states[site] for site in sites], outputs, layout

    def untrained(self, seed: int) -> "FrozenModel":
        """Return the same model before any training: its config, with fresh weights drawn from `seed`.

        They are drawn by the model's own recipe, on the CPU, so that they are the same on every device. The global
        random state is left alone. Data type, attention implementation, device and tokenizer are this model's.
        """
        # A bare encoder was loaded without the modules above its last site: leave them out here too.
        options = self.architecture.bare if self.model.base_model is self.model else {}
        config = copy.deepcopy(self.config)
        vars(config).pop("quantization_config", None)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            fresh: Any = type(self.model)(config, **options)
        placed = place_like(fresh.to(self.dtype), self.model)
        name = f"{self.name} (untrained, seed {seed})"
        return FrozenModel(placed, self.tokenizer, name=name, revision=self.revision)

    def tail(
        self,
        inputs: Inputs,
        site: int,
        states: Tensor,
        component: Component = "residual",
    ) -> Tensor:
        """Return the logits of the whole model with `states` (B, T, d), on any device, at `site`.

        Of the residual stream, no block up to `site` is run. A sub-layer adds to a stream: there the model is run
        from the text, with that one output replaced and nothing else changed. Gradients flow from the logits to
        `states`. Outside autocast, states of another dtype are converted to the model's.

        Raises:
            ValueError: if the site is outside 0..L (1..L of a sub-layer), the states have another shape, or as in
                `logits` and `front`.
        """
        self._check_answers()
        places = self._places(component)
        self.check_site(site, "site", component)
        layout = self._layout(inputs)
        expected = (*inputs["input_ids"].shape, self.width)
        if states.shape != expected:
            raise UserError(
                f"Expected `states` of shape (B, T, d) = {expected}, one row for every position of the "
                f"inputs, but got {tuple(states.shape)}."
            )
        if not _is_autocast(self.device.type):
            states = states.to(self._passed)
        states = layout.turn(states)
        if self.architecture.sequence_first:
            states = states.transpose(0, 1).contiguous()
        with inject(places, self.architecture, site, states):
            return self._caller.logits(inputs, layout)

    def tail_through(
        self, inputs: Inputs, site: int, states: Tensor, later: int
    ) -> tuple[Tensor, Tensor]:
        """Return the logits, as from `tail`, and the states (B, T, d) at a `later` site on the way.

        Raises:
            ValueError: as in `tail`.
        """
        self._check_answers()
        if later == site:
            return self.tail(inputs, site, states), states
        logits: list[Tensor] = []

        def run() -> None:
            logits.append(self.tail(inputs, site, states))

        raw = read(self.blocks, [later], run, leave=False)
        layout = self._layout(inputs)
        return logits[0], self._outward(raw[later], inputs, layout)

    def check_site(
        self, site: int, argument: str, component: Component = "residual"
    ) -> None:
        """Raise if the model does not have a site.

        Raises:
            ValueError: naming `argument` and L.
        """
        least, last = self._first_and_last(component)
        if least <= site <= last:
            return
        what = "site 0 is the input of the first and site l the output of block l"
        if component != "residual":
            what = f"and site l is what the {component} of block l adds"
        elif last > self.depth:
            what = f"{what}; site L + 1 is the output of its final norm"
        else:
            what = f"{what}; it has no final norm, whose output would be site L + 1"
        raise UserError(
            f"Expected `{argument}` between {least} and {last}, but got {site}: {self.name} has "
            f"L = {self.depth} blocks, {what}."
        )

    def _first_and_last(self, component: Component) -> tuple[int, int]:
        """The lowest and the highest site of a component."""
        last = self.last_site if component == "residual" else self.depth
        return first_site(component), last

    def self_test(self, inputs: Inputs, component: Component = "residual") -> None:
        """Check on one batch that injecting what was read gives bit-identical logits at every site.

        Raises:
            RuntimeError: naming the first site where it does not, and the largest difference there.
            ValueError: as in `logits` and `front`.
        """
        first, last = self._first_and_last(component)
        sites = range(first, last + 1)
        with torch.no_grad():
            expected = self.logits(inputs)
            if not bool(expected.isfinite().all()):
                raise RuntimeError(
                    f"{self.name} gives non-finite logits: nothing read from it can be trusted."
                )
            read_states = self.front(inputs, sites, component)
            for site, states in zip(sites, read_states, strict=True):
                received = self.tail(inputs, site, states, component)
                if torch.equal(received, expected):
                    continue
                what = f"the {component} of block {site}"
                if component == "residual":
                    what = f"site {site}"
                largest = (received - expected).abs().max().item()
                raise RuntimeError(
                    f"Injecting what was read at {what} of {self.name} changes its logits by up to {largest:.3g} "
                    "instead of by exactly 0. An evaluation would measure that difference: check the entry of "
                    f"{self.model.config.model_type!r} in aligners/models/architectures.yaml, and your own hooks."
                )

    @contextmanager
    def fresh_head(self, seed: int) -> Iterator[None]:
        """Context in which the classification head is freshly initialised, drawn from `seed`.

        The head is what lies outside the base model; it is drawn by the model's own recipe, on the CPU, so
        that it is the same on every device. No other random number is affected.

        Raises:
            ValueError: if the model has no classification head.
        """
        if self.task != "classification":
            raise UserError(
                f"Expected a model with a classification head, but got {self.name}, a "
                f"{type(self.model).__name__}. Name a model that was fine-tuned to classify."
            )
        head = drawn(self.model, outside(self.model), seed)
        with with_head(self.model, head):
            yield

    @torch.no_grad()
    def _last_states(self, ids: Tensor) -> Tensor:
        """Return the states (B, T, d) at the last site, for token ids (B, T)."""
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        (states,) = self.front(inputs, [self.depth])
        return states

    def _places(self, component: Component) -> Places:
        """Return the modules at which a component is read and injected."""
        if component == "residual":
            return self.blocks
        layer = self.architecture.sub_layer(component, self.model.config)
        return self.blocks.sub_layers(layer)

    def _check_answers(self) -> None:
        """Raise unless the model has logits. It may be run for that: before anything is read or replaced in it."""
        if self.unasked:
            raise UserError(
                f"Expected a model whose head can be asked, but {self.name} {self.unasked}. Its states can be read; "
                "name another model to ask."
            )
        if self.task is None:
            raise UserError(
                f"Expected a model with a classification head or a language modelling head, but got {self.name}, "
                f"a {type(self.model).__name__}: its states can be read, but it has no logits that follow from them "
                "alone. Name a model that was fine-tuned to classify or that predicts tokens."
            )

    def _outward(self, states: Tensor, inputs: Inputs, layout: Layout) -> Tensor:
        """Turn blocks' states for a batch, whose axes may be flattened, into (B, T, d) in the caller's order."""
        texts, tokens = inputs["input_ids"].shape
        if self.architecture.sequence_first:
            states = states.reshape(tokens, texts, -1).transpose(0, 1)
        else:
            states = states.reshape(texts, tokens, -1)
        return layout.turn_back(states)

    def _layout(self, inputs: Inputs) -> Layout:
        """The layout of a batch, before anything is run on it."""
        if self.model.training:
            # a module that holds the bare model was put into train mode
            self.model.eval()
        return self._caller.layout(inputs)

    def _check_placement(self) -> None:
        """Raise if the weights are not where they are used."""
        check_placement(self.model, self.blocks)


def quantisation(config: PreTrainedConfig) -> str | None:
    """Return the method by which a model's weights are quantised; None: they are not."""
    quantised: Any = getattr(config, "quantization_config", None)
    if quantised is None:
        return None
    if isinstance(quantised, dict):
        method = quantised.get("quant_method")
    else:
        method = getattr(quantised, "quant_method", None)
    return str(getattr(method, "value", method))


def _not_scored(config: PreTrainedConfig) -> str | None:
    """Return why a classification head's answers cannot be scored, by its `problem_type`; None: they can."""
    outputs = len(config.id2label or {})
    if config.problem_type == "multi_label_classification":
        return (
            f"answers {outputs} questions of yes or no at once (its `problem_type` is multi_label_classification), "
            "where a text has one class here"
        )
    if config.problem_type == "regression" and outputs > 1:
        return f"predicts {outputs} numbers at once (its `problem_type` is regression), where a text has one"
    return None


def _parts(name: str, weight: Any) -> Iterator[tuple[str, Any]]:
    """Yield a weight and its name, or the tensors and names that a quantised weight consists of."""
    if not hasattr(weight, "__tensor_flatten__"):
        yield name, weight
        return
    for part in weight.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(weight, part))


def _is_autocast(device: str) -> bool:
    """Tell whether autocast is on for a kind of device, and known there."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _turn_both_back(weights: Tensor, layout: Layout) -> Tensor:
    """Restore the caller's order on both token axes of (B, H, T, T)."""
    for axis in (2, 3):
        turned = layout.turn_back(weights.transpose(1, axis))
        weights = turned.transpose(1, axis)
    return weights
