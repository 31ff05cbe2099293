# SPDX-License-Identifier: Apache-2.0
"""The processor against Pillow, openpi's tokenizer and openpi's transforms: every result must be the same bits."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rlinf_phyai.models.pi05.processor import NormStats, PI05Processor, ProcessorOptions, load_norm_stats
from rlinf_phyai.models.pi05.resize import PilBilinearResize, _columns_first, resample
from rlinf_phyai.models.pi05.tokenizer import PromptTokenizer

from .conftest import SENTENCES

STATS_FILE = Path("physical-intelligence/libero/norm_stats.json")
TOKENIZER_FILE = Path("big_vision/paligemma_tokenizer.model")


def _processor(checkpoint: Path, **options) -> PI05Processor:
    return PI05Processor.from_checkpoint(checkpoint, ProcessorOptions(**options))


# -- resize ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width"),
    [
        (256, 256),
        (224, 224),
        (480, 640),
        (720, 1280),
        (128, 128),
        (64, 97),
        (225, 223),
        (100, 224),
        (640, 480),
        (500, 60),
    ],
)
def test_resize_to_224_equals_openpi(height: int, width: int) -> None:
    from openpi_client.image_tools import resize_with_pad

    images = np.random.default_rng(height * width).integers(0, 256, (2, height, width, 3), dtype=np.uint8)
    wanted = resize_with_pad(images, 224, 224)
    found = PilBilinearResize(224, 224, use_pillow=False)(torch.from_numpy(images))
    assert found.shape == (2, 3, 224, 224)
    assert found.dtype == torch.uint8
    np.testing.assert_array_equal(found.permute(0, 2, 3, 1).numpy(), wanted)


@pytest.mark.parametrize("use_pillow", [False, True])
def test_resize_to_other_sizes_equals_openpi(use_pillow: bool) -> None:
    from openpi_client.image_tools import resize_with_pad

    numbers = np.random.default_rng(1)
    for _ in range(12):
        height, width, out_height, out_width = (int(n) for n in numbers.integers(20, 200, 4))
        images = numbers.integers(0, 256, (1, height, width, 3), dtype=np.uint8)
        found = (
            PilBilinearResize(out_height, out_width, use_pillow)(torch.from_numpy(images)).permute(0, 2, 3, 1).numpy()
        )
        np.testing.assert_array_equal(found, resize_with_pad(images, out_height, out_width))


def test_the_order_of_the_passes_matters_and_is_taken_from_pillow() -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()
    wanted = np.asarray(Image.fromarray(pixels).resize((224, 224), Image.Resampling.BILINEAR))
    orders = [resample(planes, 224, 224, columns_first=order)[0].permute(1, 2, 0).numpy() for order in (False, True)]
    assert (orders[0] != orders[1]).sum() > 1000
    assert not _columns_first((256, 256), (224, 224))
    np.testing.assert_array_equal(orders[0], wanted)


def test_resize_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"torch\.float32"):
        PilBilinearResize(224, 224)(torch.zeros(1, 8, 8, 3))
    with pytest.raises(ValueError, match="crop it"):
        PilBilinearResize(8, 8)(torch.zeros(1, 900, 8, 3, dtype=torch.uint8))


# -- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_len", [200, 48, 9])
@pytest.mark.parametrize("with_state", [False, True])
def test_tokens_equal_openpi(checkpoint: Path, max_len: int, with_state: bool) -> None:
    from openpi.models.tokenizer import PaligemmaTokenizer

    states = np.random.default_rng(3).normal(size=(len(SENTENCES), 8)) if with_state else None
    ids, lengths = PromptTokenizer.from_file(checkpoint / TOKENIZER_FILE, max_len)(SENTENCES, states)
    reference = PaligemmaTokenizer(max_len)
    assert len(set(lengths.tolist())) > 1 or max_len == 9
    for row, sentence in enumerate(SENTENCES):
        tokens, mask = reference.tokenize(sentence, None if states is None else states[row])
        np.testing.assert_array_equal(ids[row].numpy(), tokens)
        np.testing.assert_array_equal(torch.arange(max_len).numpy() < int(lengths[row]), mask)
    assert ids.dtype == lengths.dtype == torch.int64


def test_a_cut_prompt_warns(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = PromptTokenizer.from_file(checkpoint / TOKENIZER_FILE, 3)
    with caplog.at_level(logging.WARNING):
        _, lengths = tokenizer([SENTENCES[0]])
    assert lengths.tolist() == [3]
    assert "more than the maximum of 3" in caplog.text
    assert SENTENCES[0] in caplog.text


def test_the_prompt_cache_is_bounded_and_keeps_the_recent(checkpoint: Path) -> None:
    tokenizer = PromptTokenizer.from_file(checkpoint / TOKENIZER_FILE, 200, cache_size=3)
    for number in range(10):
        tokenizer([f"task {number}"])
    assert list(tokenizer._cache) == ["task 7", "task 8", "task 9"]
    first, _ = tokenizer(["task 7"])  # used again, so task 8 is now the oldest
    tokenizer(["another"])
    assert list(tokenizer._cache) == ["task 9", "task 7", "another"]
    fresh, _ = PromptTokenizer.from_file(checkpoint / TOKENIZER_FILE, 200)(["task 7"])
    assert torch.equal(first, fresh)


def test_missing_and_broken_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no_such\.model"):
        PromptTokenizer.from_file(tmp_path / "no_such.model", 200)
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        PromptTokenizer(b"nonsense", 200)


# -- pixels, state, actions -----------------------------------------------------------------------------------------


def test_pixel_values_equal_openpi(checkpoint: Path) -> None:
    from openpi.models.model import Observation
    from openpi_client.image_tools import resize_with_pad

    numbers = np.random.default_rng(4)
    cameras = [numbers.integers(0, 256, (3, size, size, 3), dtype=np.uint8) for size in (256, 224)]
    found = _processor(checkpoint).pixel_values([torch.from_numpy(camera) for camera in cameras])
    resized = {str(index): torch.from_numpy(resize_with_pad(camera, 224, 224)) for index, camera in enumerate(cameras)}
    wanted = Observation.from_dict({"image": dict(resized), "image_mask": {}, "state": torch.zeros(3, 32)}).images
    assert found.dtype == torch.float32
    assert found.shape == (3, 2, 3, 224, 224)
    for index in range(2):
        assert torch.equal(found[:, index], wanted[str(index)])


@pytest.mark.parametrize("quantiles", [True, False])
def test_state_and_actions_equal_openpi(checkpoint: Path, quantiles: bool) -> None:
    from openpi import transforms
    from openpi.shared import normalize

    stats = normalize.load(checkpoint / STATS_FILE.parent)
    processor = _processor(checkpoint, use_quantiles=quantiles)
    numbers = np.random.default_rng(6)
    states = numbers.normal(size=(4, 8)).astype(np.float32)
    actions = numbers.normal(size=(4, 10, 32)).astype(np.float32)
    found_state = processor.pad_state(processor.normalize_state(torch.from_numpy(states)))
    found_actions = processor.unnormalize_actions(torch.from_numpy(actions), action_chunk=5)
    assert found_actions.dtype == torch.float64
    assert found_actions.shape == (4, 5, 7)
    for row in range(4):
        data = transforms.Normalize(stats, use_quantiles=quantiles)({"state": states[row]})
        data = transforms.PadStatesAndActions(32)(data)
        np.testing.assert_array_equal(found_state[row].numpy(), data["state"])
        undone = transforms.Unnormalize(stats, use_quantiles=quantiles)(
            {"state": data["state"], "actions": actions[row]}
        )
        np.testing.assert_array_equal(found_actions[row].numpy(), undone["actions"][:5, :7])


@pytest.mark.parametrize("quantiles", [True, False])
def test_actions_without_statistics_pass_as_openpi_passes_them(checkpoint: Path, quantiles: bool) -> None:
    """Statistics of four dimensions for a robot of seven."""
    from openpi import transforms
    from openpi.shared import normalize

    full = normalize.load(checkpoint / STATS_FILE.parent)["actions"]
    short = {key: getattr(full, key)[:4] for key in ("mean", "std", "q01", "q99")}
    stats = {
        "state": NormStats.from_values({key: np.zeros(8) for key in short}, "state"),
        "actions": NormStats(**short),
    }
    tokenizer = PromptTokenizer.from_file(checkpoint / TOKENIZER_FILE, 200)
    processor = PI05Processor(ProcessorOptions(use_quantiles=quantiles), tokenizer, stats)
    actions = np.random.default_rng(7).normal(size=(10, 32)).astype(np.float32)
    reference = transforms.Unnormalize({"actions": normalize.NormStats(**short)}, use_quantiles=quantiles)
    wanted = reference({"actions": actions})["actions"]
    found = processor.unnormalize_actions(torch.from_numpy(actions)[None])[0]
    np.testing.assert_array_equal(found.numpy(), wanted[:, :7])


def test_prompts_with_state_use_the_normalised_state(checkpoint: Path) -> None:
    from openpi import transforms
    from openpi.models.tokenizer import PaligemmaTokenizer
    from openpi.shared import normalize

    stats = normalize.load(checkpoint / STATS_FILE.parent)
    states = np.random.default_rng(8).normal(size=(2, 8)).astype(np.float32)
    processor = _processor(checkpoint, discrete_state_input=True)
    ids, lengths = processor.tokenize(SENTENCES[:2], torch.from_numpy(states))
    chain = transforms.compose(
        [
            transforms.Normalize(stats, use_quantiles=True),
            transforms.TokenizePrompt(PaligemmaTokenizer(200), discrete_state_input=True),
        ]
    )
    for row in range(2):
        wanted = chain({"state": states[row], "prompt": SENTENCES[row]})
        np.testing.assert_array_equal(ids[row].numpy(), wanted["tokenized_prompt"])
        assert int(lengths[row]) == int(wanted["tokenized_prompt_mask"].sum())
    with pytest.raises(ValueError, match="states is None"):
        processor.tokenize(SENTENCES[:2])
    for value in (np.nan, np.inf):
        broken = states[:2].copy()
        broken[1, 3] = value
        with pytest.raises(ValueError, match=r"NaN or infinite values in the samples \[1\]"):
            processor.tokenize(SENTENCES[:2], torch.from_numpy(broken))


def test_bad_inputs_are_named(checkpoint: Path) -> None:
    processor = _processor(checkpoint)
    image = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="camera 1 has 1 images"):
        processor.pixel_values([image, image[:1]])
    with pytest.raises(ValueError, match=r"camera 0 has dtype torch\.float32"):
        processor.pixel_values([image.float()])
    with pytest.raises(ValueError, match="9 dimensions"):
        processor.normalize_state(torch.zeros(1, 9))
    with pytest.raises(ValueError, match=r"allowed: 1\.\.10"):
        processor.unnormalize_actions(torch.zeros(1, 10, 32), action_chunk=11)


# -- files ----------------------------------------------------------------------------------------------------------


def test_save_and_load_keep_every_option(checkpoint: Path, tmp_path: Path) -> None:
    unusual = ProcessorOptions(
        image_size=112,
        max_token_len=77,
        discrete_state_input=True,
        action_dim=16,
        action_env_dim=6,
        use_quantiles=False,
    )
    assert all(getattr(unusual, name) != getattr(ProcessorOptions(), name) for name in vars(unusual))
    stats = load_norm_stats(checkpoint / STATS_FILE)
    original = PI05Processor(unusual, PromptTokenizer.from_file(checkpoint / TOKENIZER_FILE, 77), stats)
    original.save(tmp_path / "saved")
    loaded = PI05Processor.load(tmp_path / "saved")
    assert loaded.options == unusual
    states, actions = torch.randn(2, 8), torch.randn(2, 10, 16)
    assert torch.equal(loaded.tokenize(SENTENCES[:2], states)[0], original.tokenize(SENTENCES[:2], states)[0])
    assert torch.equal(loaded.unnormalize_actions(actions), original.unnormalize_actions(actions))
    assert torch.equal(loaded.normalize_state(states), original.normalize_state(states))


def test_a_checkpoint_without_its_files_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"norm_stats\.json"):
        PI05Processor.from_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"elsewhere\.model"):
        PI05Processor.from_checkpoint(checkpoint, tokenizer=tmp_path / "elsewhere.model")


def test_load_refuses_unknown_and_missing_options(checkpoint: Path, tmp_path: Path) -> None:
    _processor(checkpoint).save(tmp_path)
    file = tmp_path / "processor.json"
    file.write_text(file.read_text().replace('"use_quantiles"', '"use_quartiles"'))
    with pytest.raises(ValueError, match=r"unknown options \['use_quartiles'\], missing options \['use_quantiles'\]"):
        PI05Processor.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"processor\.json"):
        PI05Processor.load(tmp_path / "empty")


def test_statistics_are_checked(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"norm_stats\.json"):
        load_norm_stats(tmp_path / "norm_stats.json")
    with pytest.raises(ValueError, match="'actions' lack 'std'"):
        NormStats.from_values({"mean": [1.0]}, "actions")
    with pytest.raises(ValueError, match=r"'q01' has shape \(2,\)"):
        NormStats.from_values({"mean": [1.0], "std": [1.0], "q01": [1.0, 2.0]}, "state")
    tokenizer = PromptTokenizer.from_file(checkpoint / TOKENIZER_FILE, 200)
    with pytest.raises(ValueError, match="lack 'state'"):
        PI05Processor(ProcessorOptions(), tokenizer, {"actions": NormStats(np.zeros(7), np.ones(7))})
    plain = {name: NormStats(np.zeros(7), np.ones(7)) for name in ("state", "actions")}
    with pytest.raises(ValueError, match="no q01/q99"):
        PI05Processor(ProcessorOptions(), tokenizer, plain)
