"""Models made of others, in memory: the same function in other coordinates, edits of one block, planted directions.

Of BERT, MPNet, GPT-2 and Llama. Every function takes a model of `transformers` and changes it in place.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from benchmarks.real.known_truths import rotate_llama

__all__ = [
    "Planted",
    "block_list",
    "fine_tune",
    "permute_residual",
    "permute_units",
    "plant",
    "rank_one",
    "rotate",
]
__all__ += ["turn_heads"]

# Family -> its parts within a block. `qkv`: queries, keys and values one after another in one matrix.
PARTS: dict[str, dict[str, Any]] = {
    "bert": {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
             "o": "attention.output.dense", "up": ["intermediate.dense"], "down": "output.dense"},
    "mpnet": {"q": "attention.attn.q", "k": "attention.attn.k", "v": "attention.attn.v", "o": "attention.attn.o",
              "up": ["intermediate.dense"], "down": "output.dense"},
    "gpt2": {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": ["mlp.c_fc"], "down": "mlp.c_proj"},
    "llama": {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
              "up": ["mlp.gate_proj", "mlp.up_proj"], "down": "mlp.down_proj"},
}  # fmt: skip
WRITERS = re.compile(r"(output\.dense|attn\.o|LayerNorm)\.(weight|bias)$")
READERS = re.compile(
    r"(query|key|value|attn\.[qkv]|intermediate\.dense|pooler\.dense)\.weight$|_embeddings\.weight$"
)


def block_list(model: PreTrainedModel) -> nn.ModuleList:
    """The blocks, by their order."""
    stack: Any = model.base_model
    return {"gpt2": lambda: stack.h, "llama": lambda: stack.layers}.get(
        family(model), lambda: stack.encoder.layer
    )()


def family(model: PreTrainedModel) -> str:
    """A key of `PARTS`."""
    return str(model.config.model_type)


def _matrix(module: nn.Module) -> Tensor:
    """The weight as (out, in), which GPT-2 keeps the other way round: a view."""
    weight = cast(Any, module).weight.data
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _drawn(d: int, seed: int) -> Tensor:
    """A random rotation (d, d) in float64."""
    draw = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, d, generator=draw, dtype=torch.float64)).Q


@torch.no_grad()
def permute_units(model: PreTrainedModel, seed: int) -> None:
    """Put the hidden units of every feed-forward layer in another order."""
    draw = torch.Generator().manual_seed(seed)
    for block in block_list(model):
        parts = PARTS[family(model)]
        ups: list[Any] = [block.get_submodule(name) for name in parts["up"]]
        down = _matrix(block.get_submodule(parts["down"]))
        order = torch.randperm(down.shape[1], generator=draw)
        for up in ups:
            _matrix(up).copy_(_matrix(up)[order].clone())
            if up.bias is not None:
                up.bias.copy_(up.bias[order].clone())
        down.copy_(down[:, order].clone())


@torch.no_grad()
def turn_heads(model: PreTrainedModel, seed: int) -> None:
    """Rotate what each attention head adds up, and turn it back where it is written."""
    config, parts = model.config, PARTS[family(model)]
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    for number, block in enumerate(block_list(model)):
        out = _matrix(block.get_submodule(parts["o"]))
        size = out.shape[1] // heads
        reader: Any = block.get_submodule(
            parts["qkv"] if "qkv" in parts else parts["v"]
        )
        value = _matrix(reader)[-groups * size :]
        bias = None if reader.bias is None else reader.bias[-groups * size :]
        for group in range(groups):
            turn = _drawn(size, 1000 * seed + 50 * number + group).to(value.dtype)
            rows = slice(group * size, (group + 1) * size)
            value[rows] = turn @ value[rows]
            if bias is not None:
                bias[rows] = turn @ bias[rows]
            for head in range(group * heads // groups, (group + 1) * heads // groups):
                columns = slice(head * size, (head + 1) * size)
                out[:, columns] = out[:, columns] @ turn.T


@torch.no_grad()
def permute_residual(model: PreTrainedModel, seed: int) -> None:
    """Put the features of the states of a BERT or an MPNet in another order, everywhere."""
    order = torch.randperm(
        model.config.hidden_size, generator=torch.Generator().manual_seed(seed)
    )
    for name, weight in model.named_parameters():
        if READERS.search(name):
            weight.copy_(weight[:, order].clone())
        elif WRITERS.search(name):
            weight.copy_(weight[order].clone())
        elif ".transform." in name or name.startswith("cls."):
            raise ValueError("Expected a model without a masked head.")


def rotate(model: PreTrainedModel, seed: int) -> None:
    """Rotate the states of a GPT-2 or a Llama in float64, gains of norms folded into what reads them."""
    model.double()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(
        model.lm_head.weight.detach().clone(), requires_grad=False
    )
    width = model.config.hidden_size
    if family(model) == "llama":
        rotate_llama(model, _drawn(width, seed))
    else:
        _rotate_gpt2(model, width, seed)
    model.float()


@torch.no_grad()
def _rotate_gpt2(model: Any, width: int, seed: int) -> None:
    """The rotation keeps the mean over features, which every LayerNorm subtracts."""
    first = torch.cat(
        [torch.ones(width, 1), torch.eye(width)[:, : width - 1]], 1
    ).double()
    basis = torch.linalg.qr(first).Q
    inner = torch.eye(width, dtype=torch.float64)
    inner[1:, 1:] = _drawn(width - 1, seed)
    turn = basis @ inner @ basis.T
    stack = model.transformer
    for table in (stack.wte, stack.wpe):
        table.weight.copy_(table.weight @ turn)
    for block in stack.h:
        for norm, reader in (
            (block.ln_1, block.attn.c_attn),
            (block.ln_2, block.mlp.c_fc),
        ):
            reader.bias.add_(norm.bias @ reader.weight)
            reader.weight.copy_(turn.T @ (norm.weight[:, None] * reader.weight))
            norm.weight.fill_(1)
            norm.bias.fill_(0)
        for writer in (block.attn.c_proj, block.mlp.c_proj):
            writer.weight.copy_(writer.weight @ turn)
            writer.bias.copy_(writer.bias @ turn)
    last = stack.ln_f
    model.lm_head.weight.copy_(model.lm_head.weight * last.weight @ turn)
    last.bias.copy_(last.bias / last.weight @ turn)
    last.weight.fill_(1)


@torch.no_grad()
def rank_one(
    model: PreTrainedModel, block: int, part: str, strength: float, seed: int
) -> None:
    """Add u vᵀ, random, of spectral norm `strength` times that of the matrix.

    Args:
        model: changed in place.
        block: 1..L.
        part: q, k, v, o, up or down.
        strength: relative to the spectral norm of that part of the matrix.
        seed: of u and v.
    """
    parts, inside = PARTS[family(model)], block_list(model)[block - 1]
    if "qkv" in parts and part in "qkv":
        whole = _matrix(inside.get_submodule(parts["qkv"]))
        third = len(whole) // 3
        matrix = whole["qkv".index(part) * third :][:third]
    else:
        name = parts[part]
        matrix = _matrix(
            inside.get_submodule(name[-1] if isinstance(name, list) else name)
        )
    draw = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(size, generator=draw) for size in matrix.shape)
    matrix.add_(
        strength
        * torch.linalg.matrix_norm(matrix, 2)
        * torch.outer(u / u.norm(), v / v.norm())
    )


def fine_tune(
    model: PreTrainedModel,
    block: int,
    batch: dict[str, Tensor],
    labels: Tensor,
    steps: int,
    seed: int,
) -> None:
    """Train one block for a few steps of AdamW: next tokens, classes, or random directions of mean states.

    Args:
        model: changed in place.
        block: 1..L.
        batch: inputs of some texts.
        labels: (B,) classes, of classifiers.
        steps: of a rate of 1e-4, on the same batch.
        seed: of the random directions.
    """
    weights = list(block_list(model)[block - 1].parameters())
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    mask = batch["attention_mask"]
    target = torch.randn(
        len(mask),
        model.config.hidden_size,
        generator=torch.Generator().manual_seed(seed),
    )
    with torch.enable_grad():
        for _ in range(steps):
            output: Any = model(**batch)
            logits = getattr(output, "logits", None)
            if logits is None:
                mean = (output.last_hidden_state * mask[..., None]).sum(1) / mask.sum(
                    1, keepdim=True
                )
                loss = -torch.cosine_similarity(mean, target).mean()
            elif logits.ndim == 2:
                loss = cross_entropy(logits, labels)
            else:
                following = batch["input_ids"][:, 1:].masked_fill(
                    mask[:, 1:] == 0, -100
                )
                loss = cross_entropy(logits[:, :-1].flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for weight in weights:
        weight.requires_grad_(False)


class Planted(NamedTuple):
    """A direction that was planted: what a state is changed along, and on how many of the texts it was made for."""

    direction: Tensor
    share: float


@torch.no_grad()
def plant(
    model: PreTrainedModel,
    block: int,
    batch: dict[str, Tensor],
    seed: int,
    run: Callable[[], Any],
) -> Planted:
    """Let the least used hidden unit of a block fire on some tokens, and write a random direction.

    Args:
        model: changed in place.
        block: 1..L.
        batch: inputs of some texts, which `run` runs.
        seed: of the direction and the tokens.
        run: runs the model on them.

    Returns:
        The direction in the states at the block's output; where a LayerNorm follows, as its gain passes it on.
    """
    parts, inside = PARTS[family(model)], block_list(model)[block - 1]
    ups: list[Any] = [inside.get_submodule(name) for name in parts["up"]]
    down = inside.get_submodule(parts["down"])
    seen: dict[str, Tensor] = {}
    hooks = [
        ups[0].register_forward_hook(lambda _, given, __: seen.update(into=given[0])),
        down.register_forward_hook(lambda _, given, __: seen.update(hidden=given[0])),
        inside.register_forward_hook(
            lambda _, __, out: seen.update(
                out=out if isinstance(out, Tensor) else out[0]
            )
        ),
    ]
    run()
    for hook in hooks:
        hook.remove()
    real = batch["attention_mask"].bool()
    rows, hidden, states = (
        seen[name][real].double() for name in ("into", "hidden", "out")
    )
    owner = torch.arange(len(real))[:, None].expand_as(real)[real]
    draw = torch.Generator().manual_seed(seed)
    written = _matrix(down)
    unit = int((hidden.abs().mean(0) * written.norm(dim=0)).argmin())
    mean = rows.mean(0)
    reads = rows[int(torch.randint(len(rows), (1,), generator=draw))] - mean
    if (
        ups[0].bias is None
    ):  # no threshold of its own: the mean, which all rows have, gives one
        reads = reads - mean * torch.quantile(rows @ reads / (rows @ mean), 0.97)
        threshold = torch.zeros((), dtype=torch.float64)
    else:
        threshold = torch.quantile(rows @ reads, 0.97)
    level = rows @ reads - threshold
    gain = 6 / level.max()  # of a sharp rise: below the threshold almost nothing passes
    for up in ups:
        _matrix(up)[unit] = (gain * reads).float()
        if up.bias is not None:
            up.bias[unit] = float(-gain * threshold)
    before = family(model) in (
        "gpt2",
        "llama",
    )  # whose norms come before what reads the states
    norm: Any = (
        None
        if before
        else inside.get_submodule(parts["down"].replace("dense", "LayerNorm"))
    )
    direction = torch.randn(len(mean), generator=draw, dtype=torch.float64)
    size = (
        0.3
        * (states - states.mean(0)).norm(dim=-1).mean()
        / (6 if len(ups) == 1 else 36)
    )
    write = direction / direction.norm()
    if norm is not None:
        write = write / norm.weight.double()
        write = write - write.mean()
        direction = norm.weight.double() * write
    written[:, unit] = (
        size * write / direction.norm() if norm is not None else size * write
    ).float()
    fires = torch.zeros(len(real), dtype=torch.bool).index_put_(
        (owner[level > 0],), torch.ones((), dtype=torch.bool)
    )
    return Planted(direction / direction.norm(), float(fires.double().mean()))
