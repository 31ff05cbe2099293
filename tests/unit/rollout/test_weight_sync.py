# SPDX-License-Identifier: Apache-2.0
"""RLinf's real weight syncers against the engine's update session, sender and receiver in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rlinf.hybrid_engines.weight_syncer import patch_syncer
from rlinf.hybrid_engines.weight_syncer.bucket_syncer import BucketWeightSyncer
from rlinf.hybrid_engines.weight_syncer.patch_syncer import PatchWeightSyncer
from rlinf.utils.utils import collect_param_names_need_sync

from rlinf_phyai.checksum import checksum, checksums, require_equal
from rlinf_phyai.errors import EngineUnusableError, WeightUpdateError
from rlinf_phyai.rollout.build import build_policy
from rlinf_phyai.rollout.policy import PhyaiPolicy

from .conftest import make_observation

UNREAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
ONE_BUCKET = 1 << 30


@pytest.fixture
def policy(make_config) -> Iterator[PhyaiPolicy]:
    """A policy straight from the checkpoint: its critic has no weights yet."""
    config = make_config()
    policy = build_policy(config, config.actor.model, "cpu", 0, 4)
    yield policy
    policy.engine.close()


@pytest.fixture
def actor(make_config, build_actor) -> Any:
    return build_actor(make_config())


@pytest.fixture(autouse=True)
def _cpu_platform() -> None:
    from rlinf_phyai.platforms import cpu

    cpu.install()


def changed(actor: Any, seed: int) -> dict[str, torch.Tensor]:
    """The actor's weights after an imagined training step: every trainable one has moved."""
    noise = torch.Generator().manual_seed(seed)
    names = set(collect_param_names_need_sync(actor))
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise) if name in names else tensor.clone()
        for name, tensor in actor.state_dict().items()
    }


class Wire:
    """Both directions between a sender and a receiver."""

    def __init__(self) -> None:
        self.weights: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: asyncio.Queue[Any] = asyncio.Queue()
        self.received = 0
        self.on_receive: Callable[[int], None] = lambda count: None

    async def receive(self) -> Any:
        payload = await asyncio.wait_for(self.weights.get(), timeout=20)
        self.received += 1
        self.on_receive(self.received)
        return payload


async def send_bucketed(syncer: BucketWeightSyncer, wire: Wire, state: dict[str, torch.Tensor], names, version) -> None:
    if not syncer.sender_initialized():
        await syncer.init_sender(state, list(names), wire.weights.put)
    await syncer.sync(state, wire.weights.put, version)


async def receive(syncer: Any, wire: Wire, policy: PhyaiPolicy) -> int:
    """The receiving half as RLinf's rollout worker has it, inside our session."""
    with policy.weight_session() as session:
        if not syncer.receiver_initialized():
            await syncer.init_receiver(state_dict=policy.state_dict(), recv=wire.receive, send=wire.replies.put)
        session.version = await syncer.apply(policy, wire.receive)
    return session.version


def assert_equal_state(policy: PhyaiPolicy, wanted: dict[str, torch.Tensor], names) -> None:
    found = policy.state_dict()
    for name in names:
        if not found[name].is_meta:
            assert torch.equal(found[name], wanted[name].to(found[name].dtype)), name


def bucket_syncer(**options: Any) -> BucketWeightSyncer:
    return BucketWeightSyncer(**{"bucket_size": ONE_BUCKET, "bucket_dtype": None, "bucket_device": "cpu", **options})


# -- bucket -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_instant", [True, False])
@pytest.mark.parametrize("bucket_size", [1, 20_000, ONE_BUCKET])
def test_every_bucket_size_ends_in_the_actors_weights(load_instant, bucket_size, policy, actor) -> None:
    names = collect_param_names_need_sync(actor)
    assert UNREAD in names
    syncer, wire = bucket_syncer(load_instant=load_instant, bucket_size=bucket_size), Wire()
    frozen = {name: tensor.clone() for name, tensor in policy.state_dict().items() if name not in names}
    for version in (0, 1):
        state = changed(actor, seed=version)

        async def exchange(state: dict[str, torch.Tensor] = state, version: int = version) -> int:
            await send_bucketed(syncer, wire, state, names, version)
            return await receive(syncer, wire, policy)

        assert asyncio.run(exchange()) == version == policy.engine.version
        assert_equal_state(policy, state, names)
        assert_equal_state(policy, frozen, frozen)
    buckets = wire.received // 2
    assert buckets == (len(names) if bucket_size == 1 else 1 if bucket_size == ONE_BUCKET else buckets)
    assert bucket_size == ONE_BUCKET or buckets > 1


def test_a_bucket_dtype_is_cast_back(policy, actor) -> None:
    names, state = collect_param_names_need_sync(actor), changed(actor, seed=5)
    syncer, wire = bucket_syncer(bucket_dtype="bf16"), Wire()

    async def exchange() -> None:
        await send_bucketed(syncer, wire, state, names, 3)
        await receive(syncer, wire, policy)

    asyncio.run(exchange())
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    assert_equal_state(policy, rounded, names)
    assert policy.state_dict()["action_in_proj.weight"].dtype == torch.float32


def test_predictions_follow_the_new_weights(policy, actor) -> None:
    """After a sync the actor with the new weights finds the log-probabilities that the policy reports."""
    names, state = collect_param_names_need_sync(actor), changed(actor, seed=6)
    before = {name: tensor.clone() for name, tensor in actor.state_dict().items()}
    syncer, wire = bucket_syncer(), Wire()

    async def exchange() -> None:
        await send_bucketed(syncer, wire, state, names, 1)
        await receive(syncer, wire, policy)

    asyncio.run(exchange())
    _, result = policy.predict_action_batch(make_observation(2))
    inputs = result["forward_inputs"]
    with torch.no_grad():
        stale = actor.default_forward(forward_inputs=inputs)["logprobs"]
        try:
            actor.load_state_dict(state)
            fresh = actor.default_forward(forward_inputs=inputs)["logprobs"]
        finally:
            actor.load_state_dict(before)
    torch.testing.assert_close(result["prev_logprobs"], fresh, atol=1e-4, rtol=0)
    assert (result["prev_logprobs"] - stale).abs().max() > 1e-2


def test_the_version_moves_at_the_commit_and_no_step_runs_before(policy, actor) -> None:
    names = collect_param_names_need_sync(actor)
    syncer, wire = bucket_syncer(bucket_size=20_000), Wire()
    seen: list[int] = []

    def look(count: int) -> None:
        seen.append(policy.engine.version)
        with pytest.raises(WeightUpdateError, match="in progress"):
            policy.predict_action_batch(make_observation(1), mode="eval")

    wire.on_receive = look

    async def exchange() -> None:
        await send_bucketed(syncer, wire, changed(actor, seed=7), names, 9)
        await receive(syncer, wire, policy)

    asyncio.run(exchange())
    assert len(seen) > 2
    assert set(seen) == {0}
    assert policy.engine.version == 9


# -- failures -----------------------------------------------------------------------------------------------------------


def test_an_unknown_parameter_fails_the_sync_after_all_buckets_came(policy, actor) -> None:
    """Sorted names: a bucket before the stray one has been written, so the engine must refuse to go on."""
    state = {**changed(actor, seed=8), "m.stray": torch.zeros(3)}
    names = [*collect_param_names_need_sync(actor), "m.stray"]
    syncer, wire = bucket_syncer(bucket_size=1), Wire()

    async def exchange() -> None:
        await send_bucketed(syncer, wire, state, names, 1)
        with pytest.raises(WeightUpdateError, match=r"m\.stray"):
            await receive(syncer, wire, policy)

    asyncio.run(exchange())
    assert wire.weights.empty()
    assert wire.received == len(names)
    assert policy.engine.version == 0
    with pytest.raises(EngineUnusableError, match="build a new one"):
        policy.predict_action_batch(make_observation(1), mode="eval")
    with pytest.raises(EngineUnusableError), policy.weight_session():
        pass


def test_a_rejected_first_bucket_leaves_the_engine_usable(policy, actor) -> None:
    observation = make_observation(1)
    _, before = policy.predict_action_batch(observation, mode="eval")
    policy.sampler.set_global_step(1)
    with pytest.raises(WeightUpdateError, match=r"a\.stray"), policy.weight_session():
        policy.load_state_dict({"a.stray": torch.zeros(1), "action_in_proj.bias": torch.zeros(32)})
    assert policy.engine.version == 0
    policy.sampler.set_global_step(0)
    _, after = policy.predict_action_batch(observation, mode="eval")
    assert torch.equal(before["forward_inputs"]["chains"], after["forward_inputs"]["chains"])


def test_a_sync_that_held_nothing_is_an_error(policy) -> None:
    metadata = {
        "total_buckets": torch.tensor(1, dtype=torch.int32),
        "syncer_version": torch.tensor(4, dtype=torch.int32),
    }
    with pytest.raises(WeightUpdateError, match="held no parameter"), policy.weight_session():
        policy.load_state_dict(metadata)
    assert policy.engine.version == 0


def test_metadata_beside_weights_is_left_out(policy) -> None:
    bias = torch.arange(32.0)
    with policy.weight_session() as session:
        policy.load_state_dict({"syncer_version": torch.tensor(4, dtype=torch.int32), "action_in_proj.bias": bias})
        session.version = 4
    assert session.report is not None
    assert session.report.loaded == ["action_in_proj.bias"]
    assert torch.equal(policy.state_dict()["action_in_proj.bias"], bias)


def test_a_broken_transfer_ends_the_session_and_says_so(policy, actor) -> None:
    names = collect_param_names_need_sync(actor)
    syncer, wire = bucket_syncer(bucket_size=1), Wire()

    def fail(count: int) -> None:
        if count == 5:
            raise ConnectionError("the actor is gone")

    wire.on_receive = fail

    async def exchange() -> None:
        await send_bucketed(syncer, wire, changed(actor, seed=9), names, 1)
        with pytest.raises(ConnectionError, match="the actor is gone"):
            await receive(syncer, wire, policy)

    asyncio.run(exchange())
    assert policy.engine.version == 0
    with pytest.raises(EngineUnusableError, match="aborted after writes"):
        policy.predict_action_batch(make_observation(1))


def test_weights_outside_a_session_and_strict_loads_are_refused(policy) -> None:
    with pytest.raises(WeightUpdateError, match="outside of a weight session"):
        policy.load_state_dict({"action_in_proj.bias": torch.zeros(32)})
    with pytest.raises(WeightUpdateError, match="strict=False"), policy.weight_session():
        policy.load_state_dict({}, strict=True)


# -- patch ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def patch_sender_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLinf's patch *sender* insists on CUDA; its device-neutral builder does the same arithmetic on the CPU.

    The receiver, which is what the engine meets, runs as installed.
    """

    def on_device(snapshot, ordered_keys, names, shapes, snapshot_device, delta_encoding):
        return patch_syncer.GPUSnapshotPatchBuilder(snapshot, ordered_keys, names, shapes, delta_encoding)

    monkeypatch.setattr(patch_syncer.PatchBuilder, "create", on_device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)
    # Asks whether the accelerator is initialised, which torch.cpu cannot say.
    monkeypatch.setattr(patch_syncer, "tensors_record_stream", lambda tensors, stream=None: [])


def patch_syncers(**options: Any) -> tuple[PatchWeightSyncer, PatchWeightSyncer]:
    chosen = {"snapshot_device": "cpu", "transport_device": "cpu", "init_sync_enabled": True, **options}
    return PatchWeightSyncer(**chosen), PatchWeightSyncer(**chosen)


@pytest.mark.usefixtures("patch_sender_on_cpu")
@pytest.mark.parametrize("delta_encoding", [True, False])
def test_patches_land_in_the_live_weights(delta_encoding, policy, actor, make_config) -> None:
    sender, receiver = patch_syncers(delta_encoding=delta_encoding)
    names, wire = collect_param_names_need_sync(actor), Wire()
    pointers = {name: tensor.data_ptr() for name, tensor in policy.state_dict().items() if not tensor.is_meta}
    states = [changed(actor, seed=20)]
    states.append({name: tensor.clone() for name, tensor in states[0].items()})
    for name in ("action_out_proj.bias", "value_head.mlp.0.weight", UNREAD):  # a sparse change, in an unread one too
        states[1][name].view(-1)[::7] += 1.0
    states.append(states[1])  # nothing changed: an empty patch

    async def exchange(state: dict[str, torch.Tensor], version: int) -> None:
        async def send() -> None:
            if not sender.sender_initialized():
                await sender.init_sender(state, names, wire.weights.put, wire.replies.get)
            await sender.sync(state, wire.weights.put, version)

        task = asyncio.create_task(send())
        await receive(receiver, wire, policy)
        await task

    async def run() -> None:
        for version, state in enumerate(states):
            await exchange(state, version)
            assert_equal_state(policy, state, state)
            assert policy.engine.version == version

    asyncio.run(run())
    assert {name: t.data_ptr() for name, t in policy.state_dict().items() if not t.is_meta} == pointers
    config = make_config()
    fresh = build_policy(config, config.actor.model, "cpu", 0, 4)
    with fresh.weight_session():
        fresh.load_state_dict(states[-1])
    observation = make_observation(2)
    assert torch.equal(policy.predict_values(observation), fresh.predict_values(observation))
    _, found = policy.predict_action_batch(observation, mode="eval")
    _, wanted = fresh.predict_action_batch(observation, mode="eval")
    assert torch.equal(found["forward_inputs"]["chains"], wanted["forward_inputs"]["chains"])
    fresh.engine.close()


# -- checksums ----------------------------------------------------------------------------------------------------------


def test_checksums_agree_after_a_full_sync_and_name_what_differs(policy, actor) -> None:
    state = changed(actor, seed=30)
    with policy.weight_session():
        policy.load_state_dict(state)
    rollout = policy.parameter_checksums()
    dtypes = {name: entry.dtype for name, entry in rollout.items()}
    require_equal(checksums(state.items(), dtypes), rollout)
    assert UNREAD not in rollout
    frozen = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear.bias"
    state[frozen] = state[frozen] + 1e-6
    with pytest.raises(WeightUpdateError, match=r"multi_modal_projector.*ckpt_path"):
        require_equal(checksums(state.items(), dtypes), rollout)
    del state[frozen]
    with pytest.raises(WeightUpdateError, match="lacks 1 parameters"):
        require_equal(checksums(state.items(), dtypes), rollout)


def test_checksums_allow_for_a_narrower_transport(policy, actor) -> None:
    names, state = collect_param_names_need_sync(actor), changed(actor, seed=31)
    syncer, wire = bucket_syncer(bucket_dtype="bf16"), Wire()

    async def exchange() -> None:
        await send_bucketed(syncer, wire, state, names, 1)
        await receive(syncer, wire, policy)

    asyncio.run(exchange())
    strict, allowing = policy.parameter_checksums(), policy.parameter_checksums(syncer.bucket_dtype)
    for found in (strict, allowing):
        mine = checksums(state.items(), {name: entry.dtype for name, entry in found.items()})
        if found is allowing:
            require_equal(mine, found)
        else:
            with pytest.raises(WeightUpdateError, match="differ between actor and rollout"):
                require_equal(mine, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_checksum_sees_every_bit_and_every_position(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 8).to(dtype)
    original = checksum(tensor)
    assert checksum(tensor.clone()) == original
    assert checksum(tensor.flip(0)) != original
    assert checksum(tensor.view(7, 1)) != original
    for index in range(7):
        other = tensor.clone()
        other.view(torch.uint8).view(7, -1)[index, 0] ^= 1
        assert checksum(other) != original
    assert checksum(tensor.float(), dtype) == original
