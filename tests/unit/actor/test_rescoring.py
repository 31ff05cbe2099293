# SPDX-License-Identifier: Apache-2.0
"""The rescoring walks exactly the micro-batches that RLinf's training builds."""

from __future__ import annotations

import pytest
import torch
from rlinf.utils.nested_dict_process import split_dict_to_chunk
from rlinf.workers.actor.fsdp_actor_worker import process_nested_dict_for_train

from rlinf_phyai.actor.rescoring import BatchPlan, load, rescore, take, upload

T, B = 6, 4


def plan(**changes) -> BatchPlan:
    arguments = {"steps": T, "envs": B, "micro_batch_size": 2, "global_batch_size": 12, "world_size": 1, "seed": 42}
    return BatchPlan.of(**(arguments | changes))


@pytest.mark.parametrize(
    "micro, global_batch, world, rank", [(2, 12, 1, 0), (4, 8, 1, 0), (1, 24, 2, 1), (3, 24, 1, 0)]
)
def test_same_samples_as_training(micro, global_batch, world, rank):
    identity = torch.arange(T * B).reshape(T, B, 1)
    batch = {"prev_logprobs": identity, "forward_inputs": {"id": identity}}
    # RLinf's run_training, up to the forward
    shuffle = torch.randperm(T * B, generator=torch.Generator().manual_seed(42 + rank))
    flat = process_nested_dict_for_train(batch, shuffle)
    per_rank = global_batch // world
    expected = [
        part["forward_inputs"]["id"].flatten().tolist()
        for whole in split_dict_to_chunk(flat, T * B // per_rank)
        for part in split_dict_to_chunk(whole, per_rank // micro)
    ]
    ours = plan(micro_batch_size=micro, global_batch_size=global_batch, world_size=world, seed=42 + rank)
    assert [identity[t, b].flatten().tolist() for t, b in ours.micro_batches()] == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"global_batch_size": 10}, r"24 samples per actor rank.*batches of 10"),
        ({"global_batch_size": 9, "micro_batch_size": 2}, r"multiple of actor.micro_batch_size \(2\)"),
        ({"global_batch_size": 12, "world_size": 5}, r"number of actor ranks \(5\)"),
        ({"global_batch_size": 1, "world_size": 2}, r"number of actor ranks \(2\)"),
    ],
)
def test_batch_arithmetic_is_checked_before_any_work(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_scores_return_to_their_samples():
    inputs = {"id": torch.arange(T * B).reshape(T, B), "nested": {"x": torch.arange(T * B).reshape(T, B, 1) * 10}}

    def score(batch):
        assert torch.equal(batch["nested"]["x"][:, 0], batch["id"] * 10)
        assert not torch.is_grad_enabled()
        return {"logprobs": batch["id"].float()[:, None, None].expand(-1, 5, 7) + 0.5, "values": batch["id"].double()}

    scores = rescore(inputs, plan(), score, logprob_shape=torch.Size((T, B, 5, 7)))
    p, values = scores["logprobs"], scores["values"]
    assert torch.equal(p, (inputs["id"].float() + 0.5)[..., None, None].expand(T, B, 5, 7))
    assert p.dtype == torch.float32
    assert torch.equal(values, inputs["id"].float())


def test_a_score_of_another_shape_names_both():
    with pytest.raises(ValueError, match=r"\(2, 10, 7\).*\(2, 5, 7\)"):
        rescore(
            {"id": torch.zeros(T, B)},
            plan(),
            lambda b: {"logprobs": torch.zeros(2, 10, 7)},
            logprob_shape=torch.Size((T, B, 5, 7)),
        )


def test_loading_walks_the_micro_batches_of_every_epoch_one_ahead():
    inputs = {"id": torch.arange(T * B).reshape(T, B)}
    whole = [inputs["id"][t, b].tolist() for t, b in plan().micro_batches()]
    asked: list[int] = []

    def wanted(index: int) -> bool:
        asked.append(index)
        return index != 1

    batches = load(inputs, plan(), epochs=2, wanted=wanted)
    assert asked == []  # nothing is gathered before somebody wants it
    assert next(batches)["id"].tolist() == whole[0]
    assert asked == [0, 1]
    assert next(batches) == {}
    rest = [batch["id"].tolist() for batch in batches]
    assert rest == whole[2:] + whole
    assert len(asked) == 2 * len(whole)


def test_an_error_while_loading_reaches_the_caller():
    batches = load({"id": torch.zeros(1, 1)}, plan())
    with pytest.raises(IndexError):
        list(batches)


def test_taking_samples_copies_only_them():
    images = torch.zeros(T, B, 8, dtype=torch.uint8).transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous
    picked = take({"image": images, "none": None}, torch.tensor([0, 5]), torch.tensor([3, 1]))
    assert picked["image"].shape == (2, 8)
    assert picked["image"].untyped_storage().nbytes() == 16
    assert picked["none"] is None


def test_upload_moves_tensors_and_keeps_the_rest():
    marker = object()
    inputs = {"x": torch.arange(3), "nested": {"y": torch.ones(2)}, "plain": marker}
    moved = upload(inputs, "cpu")
    assert torch.equal(moved["x"], inputs["x"])
    assert torch.equal(moved["nested"]["y"], inputs["nested"]["y"])
    assert moved["plain"] is marker
