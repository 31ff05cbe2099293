# SPDX-License-Identifier: Apache-2.0
"""A tiny random PI0.5 or PI0 checkpoint: the whole training loop on a laptop CPU, in tests and in the quickstart.

The folder that :func:`make_tiny_checkpoint` writes has the layout of a real one:

    config.json                                    sizes under the key ``rlinf_phyai`` (see :mod:`rlinf_phyai.models.pi05.stated_sizes`)
    model.safetensors                              float32, the actor's parameter names; no value head, as in an SFT checkpoint
    physical-intelligence/libero/norm_stats.json   normalisation statistics, openpi's layout
    big_vision/paligemma_tokenizer.model           SentencePiece model; the folder can serve as ``OPENPI_DATA_HOME``

Everything is a function of the sizes and the seed: two calls write the same bytes.
"""

import io
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlinf_phyai.models.pi05.libero_sentences import LIBERO_SENTENCES
from rlinf_phyai.models.pi05.stated_sizes import CONFIG_KEY, GemmaSizes, StatedSizes

ASSET_ID = "physical-intelligence/libero"
WEIGHTS_FILE = "model.safetensors"
STATS_FILE = Path(ASSET_ID) / "norm_stats.json"
TOKENIZER_FILE = Path("big_vision") / "paligemma_tokenizer.model"

_STATE_DIM = 8  # LIBERO: end-effector position 3, axis-angle 3, gripper 2
_ENV_ACTION_DIM = 7  # LIBERO: end-effector delta 6, gripper 1


def make_tiny_checkpoint(directory: str | Path, seed: int = 0, config: StatedSizes | None = None) -> Path:
    """Write a complete tiny checkpoint and return its folder.

    Args:
        directory: created if missing; files of an earlier call are overwritten.
        seed: of the weights. The tokenizer and the statistics do not depend on it.
        config: other sizes than the default ones, which are those of PI0.5 (``TINY_SIZES["pi0"]`` for PI0).
    """
    config = config or StatedSizes()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)

    write_transform_files(directory, train_tokenizer(config.vocab_size))
    save_file(random_state_dict(config, seed), directory / WEIGHTS_FILE, metadata={"format": "pt"})
    # Last: its presence says that the rest is complete.
    (directory / "config.json").write_text(
        json.dumps({"model_type": "pi05" if config.pi05 else "pi0", CONFIG_KEY: config.to_dict()}, indent=2) + "\n"
    )
    return directory


def is_random_checkpoint(directory: Path) -> bool:
    """Whether all weights in a folder are random ones that this package wrote: its made-up statistics lie beside them."""
    files = [*directory.glob("*.safetensors"), *directory.glob("**/full_weights.pt")]
    stats = directory / STATS_FILE
    return files == [directory / WEIGHTS_FILE] and stats.is_file() and stats.read_bytes() == _stats_text().encode()


def write_transform_files(directory: Path, tokenizer: bytes) -> None:
    """What a checkpoint folder holds beside the weights: the tokenizer and LIBERO's normalisation statistics."""
    target = directory / TOKENIZER_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(tokenizer)
    stats = directory / STATS_FILE
    stats.parent.mkdir(parents=True, exist_ok=True)
    stats.write_text(_stats_text())


def _stats_text() -> str:
    return json.dumps({"norm_stats": _norm_stats()}, indent=2) + "\n"


def random_state_dict(config: StatedSizes, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights under the actor's names. Tied names (embedding and ``lm_head``) hold equal copies.

    The scales keep activations near one at every depth. AdaRMS ``dense`` weights are not zero, as a fresh model's are:
    zeros would hide a wrong modulation.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, std, mean in _parameters(config):
        tensors[name] = torch.randn(shape, generator=generator) * std + mean
    head = "paligemma_with_expert.paligemma.lm_head.weight"
    tensors[head] = tensors["paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"].clone()
    return tensors


def train_tokenizer(vocab_size: int) -> bytes:
    """A SentencePiece BPE model trained on LIBERO's sentences, with PaliGemma's special ids (pad 0, eos 1, bos 2, unk 3).

    Bytes are tokens too, so any prompt can be encoded.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_corpus(LIBERO_SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        byte_fallback=True,
        # As PaliGemma's own model: text is taken as it is, and the line end that closes a prompt is a token.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=["\n"],
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        num_threads=1,  # more threads would make the merges depend on timing
        minloglevel=2,
    )
    return model.getvalue()


def _corpus(sentences: Iterable[str]) -> Iterator[str]:
    # Both prompt formats of PI0.5 occur: the sentence alone, and the sentence with the discretised state.
    numbers = random.Random(0)
    for sentence in sentences:
        yield sentence
        for _ in range(10):
            state = " ".join(str(numbers.randrange(256)) for _ in range(_STATE_DIM))
            yield f"Task: {sentence}, State: {state};"
            yield "Action: "


def _norm_stats() -> dict[str, dict[str, list[float]]]:
    def constant(dim: int, mean: float, std: float, low: float, high: float) -> dict[str, list[float]]:
        return {"mean": [mean] * dim, "std": [std] * dim, "q01": [low] * dim, "q99": [high] * dim}

    return {
        "state": constant(_STATE_DIM, 0.0, 1.0, -1.0, 1.0),
        "actions": constant(_ENV_ACTION_DIM, 0.0, 0.3, -0.5, 0.5),
    }


_Parameter = tuple[str, tuple[int, ...], float, float]  # name, shape, standard deviation, mean


def _parameters(config: StatedSizes) -> Iterator[_Parameter]:
    root = "paligemma_with_expert."
    yield from _vision(f"{root}paligemma.model.", config)
    yield (
        f"{root}paligemma.model.language_model.embed_tokens.weight",
        (config.vocab_size, config.prefix.width),
        config.prefix.width**-0.5,  # the forward pass multiplies by sqrt(width)
        0.0,
    )
    yield from _gemma(f"{root}paligemma.model.language_model.", config.prefix, adaptive=False)
    yield from _gemma(f"{root}gemma_expert.model.", config.expert, adaptive=config.pi05)
    # Never read by the action path, but part of the actor's state dict.
    yield from _linear(f"{root}gemma_expert.lm_head", config.expert.width, config.vocab_size, bias=False)
    width = config.expert.width
    yield from _linear("action_in_proj", config.action_dim, width)
    yield from _linear("action_out_proj", width, config.action_dim)
    if config.pi05:
        yield from _linear("time_mlp_in", width, width)
        yield from _linear("time_mlp_out", width, width)
    else:
        yield from _linear("state_proj", config.action_dim, width)
        yield from _linear("action_time_mlp_in", 2 * width, width)
        yield from _linear("action_time_mlp_out", width, width)


def _linear(name: str, inputs: int, outputs: int, bias: bool = True) -> Iterator[_Parameter]:
    yield f"{name}.weight", (outputs, inputs), inputs**-0.5, 0.0
    if bias:
        yield f"{name}.bias", (outputs,), 0.1, 0.0


def _vision(root: str, config: StatedSizes) -> Iterator[_Parameter]:
    sizes = config.vision
    tower = f"{root}vision_tower.vision_model."
    patch = (sizes.hidden_size, 3, sizes.patch_size, sizes.patch_size)
    yield f"{tower}embeddings.patch_embedding.weight", patch, (3 * sizes.patch_size**2) ** -0.5, 0.0
    yield f"{tower}embeddings.patch_embedding.bias", (sizes.hidden_size,), 0.1, 0.0
    yield f"{tower}embeddings.position_embedding.weight", (sizes.tokens, sizes.hidden_size), 0.3, 0.0

    def layer_norm(name: str) -> Iterator[_Parameter]:
        yield f"{name}.weight", (sizes.hidden_size,), 0.1, 1.0
        yield f"{name}.bias", (sizes.hidden_size,), 0.1, 0.0

    for index in range(sizes.num_layers):
        layer = f"{tower}encoder.layers.{index}."
        yield from layer_norm(f"{layer}layer_norm1")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{layer}self_attn.{part}", sizes.hidden_size, sizes.hidden_size)
        yield from layer_norm(f"{layer}layer_norm2")
        yield from _linear(f"{layer}mlp.fc1", sizes.hidden_size, sizes.intermediate_size)
        yield from _linear(f"{layer}mlp.fc2", sizes.intermediate_size, sizes.hidden_size)
    yield from layer_norm(f"{tower}post_layernorm")
    yield from _linear(f"{root}multi_modal_projector.linear", sizes.hidden_size, config.prefix.width)


def _gemma(root: str, sizes: GemmaSizes, adaptive: bool) -> Iterator[_Parameter]:
    def norm(name: str) -> Iterator[_Parameter]:
        if adaptive:  # scale, shift and gate from the time embedding
            yield f"{name}.dense.weight", (3 * sizes.width, sizes.width), 0.5 * sizes.width**-0.5, 0.0
            yield f"{name}.dense.bias", (3 * sizes.width,), 0.3, 0.0
        else:  # the model multiplies by (1 + weight)
            yield f"{name}.weight", (sizes.width,), 0.1, 0.0

    heads, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    for index in range(sizes.depth):
        layer = f"{root}layers.{index}."
        yield from _linear(f"{layer}self_attn.q_proj", sizes.width, heads, bias=False)
        yield from _linear(f"{layer}self_attn.k_proj", sizes.width, keys, bias=False)
        yield from _linear(f"{layer}self_attn.v_proj", sizes.width, keys, bias=False)
        yield from _linear(f"{layer}self_attn.o_proj", heads, sizes.width, bias=False)
        yield from _linear(f"{layer}mlp.gate_proj", sizes.width, sizes.mlp_dim, bias=False)
        yield from _linear(f"{layer}mlp.up_proj", sizes.width, sizes.mlp_dim, bias=False)
        yield from _linear(f"{layer}mlp.down_proj", sizes.mlp_dim, sizes.width, bias=False)
        yield from norm(f"{layer}input_layernorm")
        yield from norm(f"{layer}post_attention_layernorm")
    yield from norm(f"{root}norm")
