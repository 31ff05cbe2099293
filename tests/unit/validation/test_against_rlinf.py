# SPDX-License-Identifier: Apache-2.0
"""Our arithmetic against RLinf's own code, on random configs.

``rlinf_verdict`` runs RLinf's validation, its router and its splitting of trajectories, and repeats the two assertions of its
training step that cannot be called without a model. The processes of a cluster are the only thing replaced: RLinf asks Ray.
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import rlinf.config
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from openpi.models import pi0_config
from rlinf.config import validate_embodied_cfg
from rlinf.models.embodiment.openpi.dataconfig import get_openpi_config
from rlinf.models.embodiment.openpi.openpi_action_model import OpenPi0Config
from rlinf.scheduler.placement.placement import ComponentPlacement
from rlinf.scheduler.worker.routing import CommMapper
from rlinf.utils.metric_utils import compute_split_num
from rlinf.utils.nested_dict_process import split_dict_to_chunk

from rlinf_phyai.validation import find_problems
from rlinf_phyai.validation.model import (
    ACTION_CHUNK,
    ACTION_HORIZON,
    CONFIG_NAMES,
    ENV_ACTION_DIM,
    NOISE_LEVEL,
    NOISE_METHODS,
    NOISE_PARAMS,
    NOISE_STD_RANGE,
    OPENPI_OPTIONS,
    PROMPT_TOKENS,
    VALID_CAMERAS,
)
from rlinf_phyai.validation.placement import Component, component, placed_twice

WORLDS = ("env", "rollout", "actor")


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The numbers that must divide each other."""

    env: int
    rollout: int
    actor: int
    stages: int
    total: int
    group: int
    epochs: int
    epoch_steps: int
    chunk: int
    micro: int
    global_batch: int

    def config(self, backend: str) -> DictConfig:
        cfg = OmegaConf.create(
            {
                "cluster": {
                    "num_nodes": 1,
                    "component_placement": {name: f"0:0-{getattr(self, name) - 1}" for name in WORLDS},
                },
                "runner": {"task_type": "embodied", "val_check_interval": -1},
                "algorithm": {"adv_type": "gae", "loss_type": "actor_critic", "group_size": self.group},
                "env": {
                    "train": {
                        "env_type": "libero",
                        "total_num_envs": self.total,
                        "group_size": self.group,
                        "rollout_epoch": self.epochs,
                        "max_episode_steps": self.epoch_steps,
                        "max_steps_per_rollout_epoch": self.epoch_steps,
                    }
                },
                "rollout": {"rollout_backend": backend, "pipeline_stage_num": self.stages, "model": {}},
                "actor": {
                    "micro_batch_size": self.micro,
                    "global_batch_size": self.global_batch,
                    "model": {"model_type": "openpi", "num_action_chunks": self.chunk, "add_value_head": True},
                },
            }
        )
        assert isinstance(cfg, DictConfig)
        return cfg


@st.composite
def arithmetics(draw: st.DrawFn) -> Arithmetic:
    """Mostly numbers that fit, each spoilt now and then: about a third of the configs can run."""

    def number(limit: int) -> int:
        return draw(st.integers(1, limit))

    def mostly(fitting: int, limit: int) -> int:
        return fitting if draw(st.integers(0, 7)) else number(limit)

    env, rollout, actor = number(4), number(3), number(4)
    stages, chunk, micro, group = (
        number(3),
        draw(st.sampled_from([1, 2, 5])),
        draw(st.sampled_from([1, 2, 4])),
        number(2),
    )
    unit = math.lcm(env * stages * group, rollout * stages, actor)
    total = mostly(unit * number(3), 64)
    epoch_steps, epochs = mostly(chunk * number(6), 30), number(3)
    samples = max(1, epoch_steps // chunk * epochs * total)
    batches = [size for size in range(micro * actor, samples + 1, micro * actor) if samples % size == 0]
    fitting = draw(st.sampled_from(batches)) if batches else micro * actor
    return Arithmetic(
        env=env,
        rollout=rollout,
        actor=actor,
        stages=stages,
        total=total,
        group=mostly(group, 4),
        epochs=epochs,
        epoch_steps=epoch_steps,
        chunk=chunk,
        micro=micro,
        global_batch=mostly(fitting, 64) if draw(st.integers(0, 7)) else micro * actor * number(8),
    )


arithmetic = arithmetics()

BATCH_CHECKS = {
    "environments_per_process",
    "environments_per_stage",
    "group_size",
    "rollout_share",
    "actor_share",
    "chunk_steps",
    "global_batch",
    "samples_per_step",
}


def rlinf_verdict(a: Arithmetic, monkeypatch: pytest.MonkeyPatch) -> str:
    """What RLinf fails with, or nothing. Uneven shares that it accepts are failures too: actors would train on them."""

    class Placement:
        def __init__(self, *_: Any) -> None:
            pass

        def get_world_size(self, name: str) -> int:
            return int(getattr(a, name))

    monkeypatch.setattr(rlinf.config, "HybridComponentPlacement", Placement)
    monkeypatch.setattr(rlinf.config, "Cluster", lambda *_: None)
    cfg = a.config("huggingface")
    try:
        validate_embodied_cfg(cfg)
        assert a.global_batch % (a.micro * a.actor) == 0  # validate_cfg, and again in the actor
        route_observations(a)
        samples = share_trajectories(a)
        per_rank = a.global_batch // a.actor
        assert samples % per_rank == 0  # run_training
        assert per_rank % a.micro == 0
    except AssertionError as error:
        return f"{error}" or "assertion"
    except (IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def route_observations(a: Arithmetic) -> None:
    """Every stage's batch on its way to the rollout and back."""
    batch = a.total // a.stages
    for src, dst in ((a.env, a.rollout), (a.rollout, a.env)):
        for rank in range(src):
            CommMapper.get_dst_ranks(batch, src, dst, rank)


def share_trajectories(a: Arithmetic) -> int:
    """The trajectories of all stages, cut and shared as RLinf does; samples of an actor process."""
    chunks = a.epoch_steps // a.chunk
    senders = a.env * a.stages
    parts = compute_split_num(a.actor, senders)
    per_stage = a.total // a.env // a.stages
    trajectory = {"prev_logprobs": torch.zeros(chunks * a.epochs, per_stage, 1)}
    pieces = split_dict_to_chunk(trajectory, parts, dim=1)
    sizes = {piece["prev_logprobs"].shape[1] for piece in pieces}
    assert len(sizes) == 1, "uneven parts"
    received = compute_split_num(senders, a.actor)
    assert received * a.actor == parts * senders, "not every part is received"
    assert per_stage * senders == a.total, "environments are lost"
    return chunks * a.epochs * received * sizes.pop()


def our_verdict(a: Arithmetic, backend: str) -> set[str]:
    problems = find_problems(a.config(backend), gpus=0, look_at_files=False)
    return {p.check for p in problems if p.severity == "error"} & BATCH_CHECKS


def property_test(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@property_test(250)
@given(a=arithmetic)
def test_phyai_refuses_exactly_what_rlinf_cannot_run(a: Arithmetic) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        theirs = rlinf_verdict(a, monkeypatch)
    ours = our_verdict(a, "phyai")
    assert bool(ours) == bool(theirs), f"{a}: ours {ours}, theirs {theirs!r}"


@property_test(100)
@given(a=arithmetic)
def test_stock_backend_is_never_refused_what_rlinf_runs(a: Arithmetic) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        theirs = rlinf_verdict(a, monkeypatch)
    if not theirs:
        assert our_verdict(a, "huggingface") == set()


@property_test(100)
@given(a=arithmetic, data=st.data())
def test_suggested_values_are_accepted(a: Arithmetic, data: st.DataObject) -> None:
    """The multiples and divisors that a message names do solve the problem that it reports."""
    problems = [p for p in find_problems(a.config("phyai"), gpus=0, look_at_files=False) if p.check in BATCH_CHECKS]
    for problem in problems:
        words = problem.fix.split(",")[0].replace(":", "").split()
        numbers = [int(word) for word in words if word.isdigit()]
        if not numbers or problem.check == "group_size":
            continue
        field = {
            "total_num_envs": "total",
            "max_steps_per_rollout_epoch": "epoch_steps",
            "global_batch_size": "global_batch",
        }[problem.key.rsplit(".", 1)[1]]
        changed = dataclasses.replace(a, **{field: data.draw(st.sampled_from(numbers))})
        assert problem.check not in our_verdict(changed, "phyai"), f"{problem} does not solve {a}"


# -- placement ---------------------------------------------------------------------------------------------------------


class Resolver:
    """What RLinf's parser asks about a node group."""

    def __init__(self, count: int) -> None:
        self.hardware_resource_count = count
        self.hardware_types = ["NV_GPU"]


rank = st.integers(0, 9).map(str)
ranks = rank | st.tuples(rank, rank).map("-".join) | st.sampled_from(["all", "", "x", "-1", "1-2-3", "ALL"])
part = ranks | st.tuples(ranks, ranks).map(":".join) | st.just("0:1:2")
placement_text = st.lists(part, min_size=1, max_size=3).map(",".join) | st.lists(rank, min_size=1, max_size=4).map(
    ",".join
)


@property_test(1000)
@given(text=placement_text, available=st.integers(1, 10))
def test_placement_syntax_is_rlinfs(text: str, available: int) -> None:
    parser = ComponentPlacement.__new__(ComponentPlacement)
    try:
        rank_map = parser._parse_rank_map(text, Resolver(available))  # type: ignore[arg-type]
        theirs = parser._rank_map_to_process_resources_map(rank_map) if rank_map else None
    except (AssertionError, ValueError):
        theirs = None
    ours = component(text, available)
    if theirs is None:
        assert isinstance(ours, str)
    else:
        assert isinstance(ours, Component)
        assert ours.world_size == len(theirs)
        assert ours.resources == tuple(tuple(theirs[process]) for process in sorted(theirs))


components = st.lists(st.sampled_from(["actor", "env", "rollout", "reward"]), min_size=1, max_size=3)


@property_test(200)
@given(entries=st.lists(components.map(", ".join), max_size=3, unique=True))
def test_components_placed_twice_are_those_that_rlinf_refuses(entries: list[str]) -> None:
    node = SimpleNamespace(hardware_type=None, hardware_resource_count=1)
    parser = ComponentPlacement.__new__(ComponentPlacement)
    cfg = OmegaConf.create({"cluster": {"component_placement": dict.fromkeys(entries, "0")}})
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Where the processes run is not the question, and takes a cluster.
        monkeypatch.setattr(ComponentPlacement, "_parse_rank_map", lambda *_: {(0,): [0]})
        monkeypatch.setattr(ComponentPlacement, "_gen_node_placement", lambda *_: None)
        monkeypatch.setattr(ComponentPlacement, "_gen_resource_placement", lambda *_: None)
        try:
            ComponentPlacement.__init__(parser, cfg, SimpleNamespace(get_node_group=lambda *_: node))  # type: ignore[arg-type]
            refused = ""
        except AssertionError as error:
            refused = str(error)
    twice = placed_twice(entries)
    assert bool(twice) == bool(refused), refused
    assert not refused or any(f"Component {name} has multiple placements" in refused for name in twice)


def test_placement_of_an_unknown_cluster() -> None:
    assert component("all", None) == Component(None, None)
    assert component("4-7", None) == Component(4, ((4,), (5,), (6,), (7,)))


# -- constants that mirror RLinf's --------------------------------------------------------------------------------------


def test_options_of_the_model_are_rlinfs() -> None:
    assert {f.name for f in dataclasses.fields(OpenPi0Config)} == OPENPI_OPTIONS


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_defaults_of_the_model_are_rlinfs(name: str) -> None:
    model = get_openpi_config(name).model
    assert isinstance(model, pi0_config.Pi0Config)
    config = OpenPi0Config(**model.__dict__)
    assert ACTION_HORIZON[name] == config.action_horizon
    assert config.action_chunk == ACTION_CHUNK
    assert ENV_ACTION_DIM[name] == config.action_env_dim
    assert config.noise_level == NOISE_LEVEL
    assert config.max_token_len == PROMPT_TOKENS[name]
    assert config.num_steps == 10
    assert config.noise_method == NOISE_METHODS[0]
    assert config.noise_params == NOISE_PARAMS
    assert config.noise_logvar_range == NOISE_STD_RANGE


def test_noise_methods_are_the_engines() -> None:
    from rlinf_phyai.models.pi05 import configuration

    assert configuration.NOISE_METHODS == NOISE_METHODS
    assert list(configuration.PI05Config().noise_std_range) == NOISE_STD_RANGE


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_unmasked_cameras_are_the_data_configs(name: str) -> None:
    from rlinf.models.embodiment.openpi.policies.libero_policy import LiberoInputs, make_libero_example

    config = get_openpi_config(name)
    masks = LiberoInputs(model_type=config.model.model_type)(make_libero_example())["image_mask"]
    assert sum(bool(mask) for mask in masks.values()) == VALID_CAMERAS[name]
    assert len(masks) == 3


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_statistics_lie_where_openpi_looks(name: str, tiny_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from openpi.training import checkpoints

    from rlinf_phyai.validation.files import ASSET_ID

    monkeypatch.setenv("OPENPI_DATA_HOME", str(tiny_checkpoint))  # or openpi downloads the tokenizer
    config = get_openpi_config(name, model_path=str(tiny_checkpoint))
    assert config.data.create(config.assets_dirs, config.model).asset_id == ASSET_ID
    assert checkpoints.load_norm_stats(tiny_checkpoint, ASSET_ID) is not None
