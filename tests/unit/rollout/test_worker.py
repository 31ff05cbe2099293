# SPDX-License-Identifier: Apache-2.0
"""The worker without Ray: only ``Worker.__init__`` and the channels are replaced; beside it runs RLinf's stock worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from rlinf.data.embodied_io_struct import RolloutResult
from rlinf.hybrid_engines.weight_syncer import WeightSyncer
from rlinf.utils.utils import collect_param_names_need_sync
from rlinf.workers.rollout.hf.huggingface_worker import MultiStepRolloutWorker

from rlinf_phyai.errors import WeightUpdateError
from rlinf_phyai.rollout.policy import PhyaiPolicy
from rlinf_phyai.rollout.worker import PhyaiRolloutWorker

from .conftest import make_observation


class _Ready:
    def __init__(self, value: Any) -> None:
        self.value = value

    async def async_wait(self) -> Any:
        return self.value


def in_process(base: type[MultiStepRolloutWorker], cfg: DictConfig, inbox: list[Any]) -> Any:
    """A worker of class ``base`` that reads environment outputs from ``inbox`` and keeps what it sends in ``sent``."""

    class InProcess(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            from rlinf_phyai.platforms.cpu import CPU_PLATFORM

            self.cfg, self.sent = cfg, []
            self._rank, self._world_size, self._group_name = 0, 1, "RolloutGroup"
            self._accelerator_type, self._timer_metrics = None, {}
            self.torch_platform, self.torch_device_type, self.device = CPU_PLATFORM, "cpu", "cpu"
            self.only_eval = cfg.runner.only_eval
            self.algorithm_cfg = cfg.algorithm
            self.model_cfg = cfg.rollout.model if self.only_eval else cfg.actor.model
            self.actor_group_name, self.actor_weight_src_rank = "ActorGroup", 0
            self._weight_sync_rollout_ranks, self._weight_sync_is_sender = [0], True
            self._sync_weight_comm_options = None
            self.num_pipeline_stages = cfg.rollout.pipeline_stage_num
            self.enable_offload = cfg.rollout.enable_offload
            self.enable_cuda_graph = False
            self.enable_train, self.rollout_epoch = not self.only_eval, 1
            self.total_num_train_envs = cfg.env.train.total_num_envs
            self.train_batch_size = self.total_num_train_envs // self.num_pipeline_stages
            self.per_node_train_batch_size = self.train_batch_size
            self.per_node_eval_batch_size = self.eval_batch_size = 6
            self.n_train_chunk_steps = cfg.env.train.max_steps_per_rollout_epoch // self.model_cfg.num_action_chunks
            self.collect_prev_infos, self.version, self.finished_episodes = True, 0, None
            self.expert_model = None
            self.weight_syncer = WeightSyncer.create(cfg.weight_syncer)

        def recv_from(self, **_: Any) -> _Ready:
            return _Ready(inbox.pop(0))

        def send_to(self, *, data: Any, **_: Any) -> None:
            self.sent.append(data)

        def broadcast(self, *_: Any, **__: Any) -> _Ready:
            payload = inbox.pop(0)
            if isinstance(payload, Exception):
                raise payload
            return _Ready(payload)

    return InProcess()


@pytest.fixture(autouse=True)
def _cpu_platform() -> None:
    from rlinf_phyai.platforms import cpu

    cpu.install()


@pytest.fixture
def make_worker(build_actor) -> Iterator[Callable[..., Any]]:
    """``make_worker(config, inbox)`` with the actor's weights in the engine."""
    policies: list[PhyaiPolicy] = []

    def make(cfg: DictConfig, inbox: list[Any], synced: bool = True) -> Any:
        worker = in_process(PhyaiRolloutWorker, cfg, inbox)
        worker.init_worker()
        policies.append(worker.hf_model)
        if synced:
            with worker.hf_model.weight_session() as session:
                worker.hf_model.load_state_dict(build_actor(cfg).state_dict())
                session.version = 0
        return worker

    yield make
    for policy in policies:
        policy.engine.close()


def epoch_inbox(stages: int = 1, final_at: int | None = None, batch: int = 4) -> list[dict[str, Any]]:
    """Environment outputs of one epoch: two chunk steps and the last observation, per stage."""
    outputs = [{"obs": make_observation(batch, seed=index)} for index in range(3 * stages)]
    if final_at is not None:
        outputs[final_at]["final_obs"] = make_observation(batch, seed=100)
    return outputs


def run_epoch(worker: Any) -> list[RolloutResult]:
    worker.sent.clear()
    asyncio.run(worker.generate_one_epoch(None, None))
    return worker.sent


def test_an_epoch_sends_what_the_stock_worker_sends(make_config, make_worker, build_actor) -> None:
    config = make_config()
    ours = run_epoch(make_worker(config, epoch_inbox(final_at=1)))
    stock = in_process(MultiStepRolloutWorker, config, epoch_inbox(final_at=1))
    stock.hf_model = build_actor(config)
    stock.setup_sample_params()
    stock_results = run_epoch(stock)
    assert len(ours) == len(stock_results) == 3
    for found, wanted in zip(ours, stock_results, strict=True):
        for field in ("actions", "prev_logprobs", "prev_values", "bootstrap_values", "versions", "save_flags"):
            left, right = getattr(found, field), getattr(wanted, field)
            assert (left is None) == (right is None), field
            if right is not None:
                assert (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device), field
        assert set(found.forward_inputs or {}) == set(wanted.forward_inputs or {})
        for name, tensor in (wanted.forward_inputs or {}).items():
            assert (found.forward_inputs[name].shape, found.forward_inputs[name].dtype) == (tensor.shape, tensor.dtype)
    # The critic reads the observation only, so both workers must report the same values.
    for found, wanted in zip(ours, stock_results, strict=True):
        torch.testing.assert_close(found.prev_values, wanted.prev_values, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours[1].bootstrap_values, stock_results[1].bootstrap_values, atol=1e-4, rtol=0)


def test_the_last_prediction_of_an_epoch_and_bootstraps_cost_a_prefix_only(
    make_config, make_worker, monkeypatch
) -> None:
    worker = make_worker(make_config(), [])
    calls: list[str] = []
    for name in ("rollout_step", "value"):
        original = getattr(worker.hf_model.engine, name)
        monkeypatch.setattr(
            worker.hf_model.engine, name, lambda request, f=original, n=name: (calls.append(n), f(request))[1]
        )
    inbox = epoch_inbox(final_at=1)
    for _ in range(2):  # a second epoch must start counting anew
        worker.recv_from = lambda **_: _Ready(inbox.pop(0))
        inbox[:] = epoch_inbox(final_at=1)
        calls.clear()
        results = run_epoch(worker)
        assert calls == ["rollout_step", "rollout_step", "value", "value"]  # the bootstrap comes with the second
        assert results[2].prev_logprobs is None
        assert results[2].actions.isnan().all()
        assert not results[2].prev_values.isnan().any()


def test_pipeline_stages_each_get_their_last_value(make_config, make_worker) -> None:
    worker = make_worker(make_config("rollout.pipeline_stage_num=2"), epoch_inbox(stages=2, batch=2))
    assert worker.hf_model.engine.max_batch_size == 2
    results = run_epoch(worker)
    assert [result.prev_logprobs is None for result in results] == [False] * 4 + [True] * 2
    assert all(result.actions.shape == (2, 5, 7) for result in results)


def test_a_critic_after_the_expert_keeps_the_full_last_prediction(make_config, make_worker) -> None:
    worker = make_worker(make_config("actor.model.openpi.value_after_vlm=false"), epoch_inbox())
    results = run_epoch(worker)
    assert results[2].prev_values.shape == (4, 1)
    assert not results[2].prev_values.isnan().any()


def test_values_from_the_actor_come_as_nan_until_the_last(make_config, make_worker) -> None:
    worker = make_worker(make_config("rollout.phyai.value_source=actor"), epoch_inbox(final_at=1))
    results = run_epoch(worker)
    assert [bool(result.prev_values.isnan().all()) for result in results] == [True, True, False]
    assert not results[1].bootstrap_values.isnan().any()


def test_without_a_critic_there_is_no_bootstrap(make_config, make_worker) -> None:
    overrides = ("actor.model.add_value_head=false", "actor.model.openpi.add_value_head=false")
    worker = make_worker(make_config(*overrides), epoch_inbox(final_at=1))
    results = run_epoch(worker)
    assert all(result.bootstrap_values is None for result in results)
    assert all(torch.equal(result.prev_values, torch.zeros(4, 1)) for result in results)


def test_evaluation_does_not_count_as_a_prediction_of_the_epoch(make_config, make_worker) -> None:
    inbox = epoch_inbox()
    worker = make_worker(make_config(), inbox)

    def evaluate_first(**_: Any) -> _Ready:
        actions, result = worker.predict(make_observation(2), mode="eval")
        assert actions.shape == (2, 5, 7)
        assert not result["prev_logprobs"].any()
        return _Ready(inbox.pop(0))

    worker.recv_from = evaluate_first
    assert [result.prev_logprobs is None for result in run_epoch(worker)] == [False, False, True]


def test_the_engine_is_sized_to_the_workers_environments(make_config, make_worker) -> None:
    assert make_worker(make_config(), []).hf_model.engine.max_batch_size == 4
    assert make_worker(make_config("rollout.phyai.max_batch_size=3"), []).hf_model.engine.max_batch_size == 3


def test_ckpt_path_is_loaded_on_top(make_config, make_worker, build_actor, tmp_path) -> None:
    config = make_config()
    state = {name: tensor + 0.25 for name, tensor in build_actor(config).state_dict().items()}
    torch.save(state, tmp_path / "run.pt")
    worker = make_worker(make_config(f"runner.ckpt_path={tmp_path / 'run.pt'}"), [], synced=False)
    found = worker.hf_model.state_dict()
    for name in ("action_in_proj.bias", "paligemma_with_expert.paligemma.model.multi_modal_projector.linear.bias"):
        assert torch.equal(found[name], state[name])  # trainable and frozen alike
    assert worker.hf_model.predict_values(make_observation(1)).shape == (1, 1)  # the run's critic came along


def test_evaluation_acts_by_the_weights_of_ckpt_path(make_config, make_worker, build_actor, tmp_path) -> None:
    """The same observation and the same noise: other weights act otherwise, the same weights act the same."""
    config = make_config("runner.only_eval=true")
    state = build_actor(config).state_dict()
    torch.save(state, tmp_path / "same.pt")
    torch.save({name: tensor + 0.25 for name, tensor in state.items()}, tmp_path / "other.pt")

    def act(*overrides: str) -> torch.Tensor:
        config = make_config("runner.only_eval=true", *overrides)
        config.rollout.model = config.actor.model
        actions, _ = make_worker(config, [], synced=False).predict(make_observation(2), mode="eval")
        return actions

    acted = act()
    assert torch.equal(act(f"runner.ckpt_path={tmp_path / 'same.pt'}"), acted)
    assert not torch.allclose(act(f"runner.ckpt_path={tmp_path / 'other.pt'}"), acted, atol=1e-3)


def test_evaluating_only_uses_the_rollouts_own_model_section(make_config, make_worker) -> None:
    config = make_config("runner.only_eval=true")
    config.rollout.model = config.actor.model
    worker = make_worker(config, [], synced=False)
    assert worker.hf_model.engine.max_batch_size == 6
    actions, _ = worker.predict(make_observation(2), mode="eval")
    assert torch.isfinite(actions).all()


# -- weight sync --------------------------------------------------------------------------------------------------------


def buckets(worker: Any, actor: Any, version: int, extra: dict[str, torch.Tensor] | None = None) -> list[Any]:
    """What RLinf's actor would broadcast."""
    state = {**actor.state_dict(), **(extra or {})}
    sender, sent = WeightSyncer.create(worker.cfg.weight_syncer), []

    async def put(bucket: dict[str, torch.Tensor]) -> None:
        sent.append(bucket)

    async def send() -> None:
        await sender.init_sender(state, [*collect_param_names_need_sync(actor), *(extra or {})], put)
        await sender.sync(state, put, version)

    asyncio.run(send())
    return sent


def test_a_sync_moves_weights_and_version_together(make_config, make_worker, build_actor) -> None:
    config, inbox = make_config("weight_syncer.bucket.bucket_size=20000"), []
    worker = make_worker(config, inbox, synced=False)
    inbox += buckets(worker, build_actor(config), version=7)
    assert len(inbox) > 2
    asyncio.run(worker.sync_model_from_actor())
    assert not inbox
    assert worker.version == worker.hf_model.engine.version == 7
    assert worker.finished_episodes == 7 * 4
    name = "value_head.mlp.0.weight"
    assert torch.equal(worker.hf_model.state_dict()[name], build_actor(config).state_dict()[name])
    assert worker.hf_model.predict_action_batch(make_observation(1))[1]["prev_values"].shape == (1, 1)


def test_a_failed_sync_raises_after_the_last_bucket_and_keeps_the_version(
    make_config, make_worker, build_actor
) -> None:
    config, inbox = make_config("weight_syncer.bucket.bucket_size=1"), []
    worker = make_worker(config, inbox)
    inbox += buckets(worker, build_actor(config), version=7, extra={"m.stray": torch.zeros(2)})
    with pytest.raises(WeightUpdateError, match=r"m\.stray"):
        asyncio.run(worker.sync_model_from_actor())
    assert not inbox
    assert worker.version == worker.hf_model.engine.version == 0


def test_a_lost_connection_keeps_the_version(make_config, make_worker, build_actor) -> None:
    config, inbox = make_config("weight_syncer.bucket.bucket_size=1"), []
    worker = make_worker(config, inbox)
    inbox += [*buckets(worker, build_actor(config), version=7)[:3], ConnectionError("gone")]
    with pytest.raises(ConnectionError, match="gone"):
        asyncio.run(worker.sync_model_from_actor())
    assert worker.version == worker.hf_model.engine.version == 0


# -- offload ------------------------------------------------------------------------------------------------------------


def test_offload_between_rollouts_changes_no_result(make_config, make_worker, build_actor) -> None:
    """RLinf's order: build and offload, sync, reload, rollout, offload; beside it a worker that keeps its memory."""
    results = []
    for offload in (True, False):
        config, inbox = make_config(f"rollout.enable_offload={offload}"), []
        worker = make_worker(config, inbox, synced=False)
        assert worker.hf_model.engine.offloaded == offload
        for version in (1, 2):
            inbox += buckets(worker, build_actor(config), version=version)
            asyncio.run(worker.sync_model_from_actor())
            assert not worker.hf_model.engine.offloaded
            inbox += epoch_inbox(final_at=1)
            asyncio.run(worker.generate(None, None))
            assert worker.hf_model.engine.offloaded == offload
            assert worker.hf_model.engine.version == version
        results.append(worker.sent)
    for found, wanted in zip(*results, strict=True):
        for field in ("actions", "prev_logprobs", "prev_values", "bootstrap_values"):
            left, right = getattr(found, field), getattr(wanted, field)
            assert (left is None) == (right is None)
            if right is not None:
                torch.testing.assert_close(left, right, atol=0, rtol=0, equal_nan=True)


# -- refusals -----------------------------------------------------------------------------------------------------------


def test_expert_models_are_refused(make_config, make_worker) -> None:
    with pytest.raises(NotImplementedError, match="expert_model"):
        make_worker(make_config("rollout.expert_model.model_path=x"), [])
