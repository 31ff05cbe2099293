# SPDX-License-Identifier: Apache-2.0
"""The engine: one loaded model, its life cycle, and the lock that orders steps and weight updates.

It knows nothing of RLinf: it can be used and tested alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from rlinf_phyai.engine.config import EngineArgs
from rlinf_phyai.engine.graphs import GraphCache
from rlinf_phyai.engine.kernel_policy import KernelPolicy, load_kernel_policy
from rlinf_phyai.engine.offload import HostCopy
from rlinf_phyai.engine.weight_update import Batch, UpdateState, WeightUpdater
from rlinf_phyai.errors import EngineClosedError, EngineOffloadedError, KernelPolicyError, RequestError
from rlinf_phyai.kernels import UnknownKernel, resolve
from rlinf_phyai.models.pi05.checkpoint import VALUE_HEAD, LoadReport
from rlinf_phyai.models.pi05.configuration import PI05Config
from rlinf_phyai.models.pi05.exposed import ExposedMemory
from rlinf_phyai.models.pi05.plugin import PI05Model
from rlinf_phyai.models.pi05.requests import (
    CheckedRequest,
    PI05Request,
    PI05RolloutOutput,
    PI05RolloutRequest,
    check_request,
)
from rlinf_phyai.models.pi05.stages import stage_programs
from rlinf_phyai.models.pi05.weights import NOISE_LAYERS

logger = logging.getLogger(__name__)

PLUGINS = {"pi05": PI05Model}


class Engine:
    """A PI0.5 inference engine with hot weight updates. All calls are thread-safe; one runs at a time.

    ``Engine(args)`` does everything: kernel choice, memory check, weight loading, tables and (on CUDA) graph capture.

    Raises:
        CheckpointError, KernelPolicyError, PhyaiError (does not fit), ValueError (unknown plugin).
    """

    def __init__(self, args: EngineArgs) -> None:
        if args.plugin not in PLUGINS:
            raise ValueError(f"EngineArgs.plugin is {args.plugin!r}; available: {', '.join(sorted(PLUGINS))}.")
        runtime = args.config.runtime
        self.device = _resolve_device(args.config.device.target)
        self.params_dtype = args.config.device.params_dtype
        self.runtime = runtime
        self.kernel_policy: KernelPolicy = load_kernel_policy(runtime.kernel_policy)
        try:
            kernels, self.kernel_backends = resolve(
                self.kernel_policy.operations, self.device, self.kernel_policy.fallback
            )
        except UnknownKernel as error:
            raise KernelPolicyError(
                f"kernel policy {self.kernel_policy.name} ({self.kernel_policy.source}): {error}"
            ) from error
        self._lock = threading.RLock()
        self._graphs = GraphCache(runtime.max_graphs)
        self._use_graphs = runtime.use_cuda_graph and self.device.type == "cuda"
        self._ready: torch.cuda.Event | None = None
        with self._own_modes():
            model = PLUGINS[args.plugin](
                args.plugin_args, kernels, self.device, self.params_dtype, runtime.seed, runtime.progress
            )
            self._model: PI05Model | None = model
            self._host_copy = HostCopy(model.weights.memory)
            self._updater = WeightUpdater(model.weights, model.canonical_name, model.tables.refresh)
            model.tables.refresh()
        self.load_report: LoadReport = model.load_report
        self.model_config: PI05Config = model.config
        self.max_batch_size: int = model.args.max_batch_size
        logger.info(
            "engine: %s, %s, kernel policy %s; %s",
            self.device,
            self.params_dtype,
            self.kernel_policy.name,
            self.load_report.summary(),
        )
        if self.device.type == "cuda":
            self._warm_up(model)

    # -- inference --

    def step(self, request: PI05Request) -> Tensor:
        """Deterministic actions: float32 [B, H, D] on the engine's device.

        Raises:
            RequestError, EngineClosedError, EngineUnusableError, WeightUpdateError (an update is in progress).
        """
        with self._running(request) as (model, checked):
            return model.scheduler.step(checked, self._run)

    def rollout_step(self, request: PI05RolloutRequest) -> PI05RolloutOutput:
        """Sampled actions with chain, log-probabilities and value. Raises as :meth:`step`."""
        if not isinstance(request, PI05RolloutRequest):
            raise RequestError(f"rollout_step needs a PI05RolloutRequest; found {type(request).__name__}.")
        with self._running(request) as (model, checked):
            if request.compute_value:
                self._check_critic(model)
            steps = request.stochastic_steps
            if self.model_config.noise_method == "flow_noise" and (steps is None or bool(steps.any())):
                self._check_written(model, "noise head", NOISE_LAYERS, "stochastic_steps all False")
            return model.scheduler.rollout(checked, request.compute_value, self._run)

    def value(self, request: PI05Request) -> Tensor:
        """Critic after the VLM: float32 [B, 1], by the prefix alone. Raises as :meth:`step`."""
        with self._running(request) as (model, checked):
            self._check_critic(model)
            return model.scheduler.value(checked, self._run)

    def stages(self, request: PI05Request) -> dict[str, Callable[[], Any]]:
        """The parts of :meth:`step` on this request as separate calls, in order: ``vision``, ``prefix``, ``denoise``.

        For latency measurements. Each call repeats its part on what the parts before it left (as a CUDA graph of its own when
        graphs are on) and raises as :meth:`step`; use them before the next weight update only. The last one gives the actions.
        """
        with self._running(request) as (model, checked):
            programs = stage_programs(model.scheduler, checked, self._run)

        def ordered(program: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                with self._running(request):
                    return program()

            return call

        return {name: ordered(program) for name, program in programs.items()}

    def _check_critic(self, model: PI05Model) -> None:
        if self.model_config.value_mode is not None:
            self._check_written(model, "critic", VALUE_HEAD, "compute_value=False")

    @staticmethod
    def _check_written(model: PI05Model, part: str, stem: str, instead: str) -> None:
        if not model.weights.head_written(stem):
            raise RequestError(
                f"the {part} has no weights yet: the checkpoint holds no {stem}*; send them by a weight update first, or set "
                f"{instead}."
            )

    @contextmanager
    def _running(self, request: PI05Request) -> Iterator[tuple[PI05Model, CheckedRequest]]:
        with self._lock:
            self._updater.check_usable()
            self._check_loaded()
            assert self._model is not None
            checked = check_request(
                request, self.model_config, self.max_batch_size, self.device, self.runtime.check_finite
            )
            with self._own_modes(), self._stream_order():
                yield self._model, checked

    def _run(self, key: Hashable, program: Any, keep_alive: Any) -> Any:
        return self._graphs.run(key, program, keep_alive) if self._use_graphs else program()

    @contextmanager
    def _own_modes(self) -> Iterator[None]:
        """Neither the caller's autograd, inference mode (its tensors could not be written later) nor autocast counts here."""
        autocast = torch.autocast(self.device.type, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), autocast, self._matmul_precision():
            yield

    @contextmanager
    def _matmul_precision(self) -> Iterator[None]:
        """TF32 for the few float32 GEMMs on CUDA, as the actor uses; the process's setting is restored."""
        if self.device.type != "cuda":
            yield
            return
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            with torch.cuda.device(self.device):
                yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    @contextmanager
    def _stream_order(self) -> Iterator[None]:
        """Orders calls that come from different CUDA streams."""
        if self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        if self._ready is not None:
            stream.wait_event(self._ready)
        try:
            yield
        finally:
            self._ready = stream.record_event(self._ready)

    def _warm_up(self, model: PI05Model) -> None:
        """One call of the largest batch: compiles kernels, captures the graph, and meets an out-of-memory error at start."""
        c, batch = self.model_config, self.max_batch_size
        size = c.vision.image_size
        f32 = torch.float32
        ids = torch.zeros(batch, c.tokenizer_max_length, dtype=torch.int64)
        lens = torch.full((batch,), min(20, c.tokenizer_max_length), dtype=torch.int64)
        cameras = model.args.usual_cameras(c.num_cameras)
        pixels = torch.zeros(batch, cameras, 3, size, size, dtype=f32, device=self.device)
        noise = torch.zeros(batch, c.action_horizon, c.action_dim, dtype=f32)
        state = None if c.pi05 else torch.zeros(batch, c.action_dim, dtype=f32)
        if model.args.capture_rollout:
            learned = c.noise_method == "flow_noise"
            sigmas = None if learned else torch.zeros(batch, c.num_steps, dtype=f32)
            steps = torch.zeros(batch, c.num_steps, dtype=torch.bool) if learned else None
            step_noise = torch.zeros(batch, c.num_steps, c.action_horizon, c.action_dim, dtype=f32)
            self.rollout_step(
                PI05RolloutRequest(pixels, ids, lens, noise, None, sigmas, step_noise, False, steps, state=state)
            )
        else:
            self.step(PI05Request(pixels, ids, lens, noise, state=state))
        torch.cuda.synchronize(self.device)

    # -- weights --

    @property
    def version(self) -> int:
        """Version of the weights; moves only when an update is finished."""
        return self._updater.version

    @property
    def state(self) -> UpdateState:
        """idle, updating-clean, updating-dirty, unusable or closed."""
        return self._updater.state

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter by the actor's name and in its order, as a view of the live storage.

        Writing to a view is allowed inside a weight update only, and by torch operations on the view itself: torch does not
        count writes through ``view.data``, ``view.numpy()`` or DLPack, so the engine cannot notice them. While the engine is
        offloaded, any access to a view's values raises a RuntimeError. The expert's output head is a meta tensor.

        Raises:
            EngineClosedError, EngineOffloadedError.
        """
        with self._lock:
            if self._model is None:
                raise EngineClosedError("the engine is closed; build a new one.")
            self._check_loaded()
            return dict(self._model.weights.views)

    def begin_weight_update(self) -> None:
        """Opens a weight update; steps are refused until it is finished or aborted. Raises WeightUpdateError."""
        with self._lock:
            self._check_loaded()
            self._updater.begin()

    def update_weights(self, batch: Batch) -> None:
        """Writes a mapping or iterable of (name, tensor), any subset, in place. Raises WeightUpdateError (nothing written)."""
        with self._lock, self._own_modes(), self._stream_order():
            self._updater.update(batch)

    def finish_weight_update(self, version: int | None = None, require_all: bool = False) -> LoadReport:
        """Commits the update: derived tables are refreshed, the version moves. Returns what came and what did not."""
        with self._lock, self._own_modes(), self._stream_order():
            report = self._updater.finish(version, require_all)
            came = set(report.loaded)
            self.load_report.optional = [name for name in self.load_report.optional if name not in came]
            return report

    def abort_weight_update(self) -> None:
        """Ends an update without committing. After a write the engine is unusable (mixed weights)."""
        with self._lock:
            self._updater.abort()

    @contextmanager
    def weight_update(self, version: int | None = None, require_all: bool = False) -> Iterator[Any]:
        """``with engine.weight_update(version) as update: update(batch)``; commits at the end, aborts when the block raises."""
        self.begin_weight_update()
        try:
            yield self.update_weights
        except BaseException:
            with self._lock:
                self._updater.fail_session("a weight update failed after writes")
            raise
        self.finish_weight_update(version, require_all)

    # -- offload --

    @property
    def offloaded(self) -> bool:
        """True between :meth:`offload` and :meth:`reload`: steps, weight updates and ``state_dict`` are refused."""
        return self._host_copy.away

    def offload(self) -> None:
        """Moves the weights to the host and frees graphs and buffers, so that others may use the device's memory.

        The host keeps a copy of all weights from then on (page-locked on CUDA). On an offloaded engine it does nothing. Until
        :meth:`reload`, reading or writing a tensor that :meth:`state_dict` gave out raises a RuntimeError that says so; afterwards
        it is good again. Views that the caller made of one keep raising and must be made anew. Drop numpy arrays, DLPack capsules
        and addresses taken from one before the call: nothing guards those.

        Raises:
            EngineClosedError, EngineUnusableError, WeightUpdateError (an update is in progress), PhyaiError (too little host memory).
        """
        with self._lock, self._own_modes(), self._stream_order():
            self._updater.check_usable()
            if self.offloaded:
                return
            assert self._model is not None
            begin, graphs = time.perf_counter(), len(self._graphs)
            self._free_working_memory(self._model)
            copied = self._host_copy.save()
            self._model.tables.release()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            logger.info(
                "engine: offloaded %.2f GiB in %.2f s (%.2f GiB copied, %d graphs dropped)",
                self._host_copy.num_bytes / 2**30, time.perf_counter() - begin, copied / 2**30, graphs,
            )  # fmt: skip

    def reload(self) -> None:
        """Brings the weights back, bit for bit; graphs are captured again when a step first needs them.

        On an engine that is not offloaded it does nothing.

        Raises:
            EngineClosedError, EngineUnusableError, WeightUpdateError (an update is in progress), torch.OutOfMemoryError (the engine
            stays offloaded).
        """
        with self._lock, self._own_modes(), self._stream_order():
            self._updater.check_usable()
            if not self.offloaded:
                return
            begin = time.perf_counter()
            self._host_copy.restore()
            assert self._model is not None
            try:
                self._model.tables.refresh()
            except BaseException:  # also an interrupt: tables that are half made must not be used
                self._model.tables.release()
                self._host_copy.save()
                raise
            note = "; graphs are captured again on first use" if self._use_graphs else ""
            logger.info("engine: reloaded in %.2f s%s", time.perf_counter() - begin, note)

    def _check_loaded(self) -> None:
        if self.offloaded:
            raise EngineOffloadedError("the engine is offloaded: its weights are on the host; call reload() first.")

    def _free_working_memory(self, model: PI05Model) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._graphs.clear()
        model.scheduler.clear()

    # -- life cycle --

    def captured_graphs(self) -> dict[Hashable, Any]:
        """The captured CUDA graphs by key (empty on CPU or with graphs off)."""
        with self._lock:
            return self._graphs.graphs()

    def close(self) -> None:
        """Frees graphs, buffers and weights. A weight update in progress is ended. Closing twice is fine."""
        with self._lock:
            self._updater.close()
            self._graphs.clear()
            self._model = None
            self._host_copy = HostCopy(ExposedMemory({}, {}))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _resolve_device(target: str) -> torch.device:
    device = torch.device(target)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"DeviceConfig.target is {target!r}, but torch sees no CUDA device; use 'cpu' or fix the driver."
            )
        index: int | None = device.index
        device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        if device.index >= torch.cuda.device_count():
            raise ValueError(
                f"DeviceConfig.target is {target!r}, but there are {torch.cuda.device_count()} CUDA devices."
            )
    return device
