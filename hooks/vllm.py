"""The vLLM plugin: records every worker of an engine that ``routeprof run`` started.

vLLM loads it in all its processes (entry point ``vllm.general_plugins``). Unless the environment
asks for a recording it returns at once. It works inside the workers: taps go into the routers
when the model is loaded, before anything is compiled or captured; steps are opened and closed
around ``execute_model``, which warm-up, profiling, dummy and capture runs do not go through.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from routeprof.hooks.configuration import configuration
from routeprof.hooks.session import Session, Settings, open_session, say, settings, wants
from routeprof.hooks.vllm_steps import Requests, Step, own_rows
from routeprof.hooks.widths import expert_width
from routeprof.topology import ModelInfo, RankRole

if TYPE_CHECKING:
    from torch import Tensor

    from routeprof.hooks.vllm_layers import FoundRunner, Tap

_MARK = "_routeprof"
"""Attribute that tells what has been wrapped: vLLM may load plugins more than once."""


def register() -> None:
    """Entry point: make the workers of this process record, if that is asked for."""
    try:
        wanted = settings()
        if wanted is not None:
            _separate_caches(wanted)
            _watch_workers(wanted)
    except Exception as error:
        say(f"vLLM is not recorded: {error}")


def _separate_caches(wanted: Settings) -> None:
    """Keep graphs with taps and graphs without apart: vLLM's compile cache does not know us."""
    from vllm.config import VllmConfig

    from routeprof import __version__

    compute_hash = VllmConfig.compute_hash
    if hasattr(compute_hash, _MARK):
        return
    own = f"routeprof {__version__} gate={wanted.gate} level={wanted.level}"

    @functools.wraps(compute_hash)
    def with_taps(self: Any) -> str:
        text = f"{compute_hash(self)} {own}"
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    setattr(with_taps, _MARK, True)
    VllmConfig.compute_hash = with_taps


def _watch_workers(wanted: Settings) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    init_device = WorkerWrapperBase.init_device
    if hasattr(init_device, _MARK):
        return

    @functools.wraps(init_device)
    def init_and_watch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = init_device(self, *args, **kwargs)
        try:
            _watch_runner(self.worker, wanted)
        except Exception as error:
            say(f"vLLM is not recorded: {error}")
        return result

    setattr(init_and_watch, _MARK, True)
    WorkerWrapperBase.init_device = init_and_watch


def _watch_runner(worker: Any, wanted: Settings) -> None:
    runner = worker.model_runner
    load_model = runner.load_model

    @functools.wraps(load_model)
    def load_and_attach(*args: Any, **kwargs: Any) -> Any:
        result = load_model(*args, **kwargs)
        try:
            attach(worker, wanted)
        except Exception as error:
            say(f"vLLM is not recorded: {error}")
        return result

    runner.load_model = load_and_attach


# -- a worker whose model is loaded


def attach(worker: Any, wanted: Settings) -> None:
    """Tap the routers of a worker's model and record its steps.

    Raises:
        RecordingExistsError: the directory holds something already.
    """
    from routeprof.hooks.vllm_layers import dense_layers, find_runners, tap

    runner = worker.model_runner
    config, model = runner.vllm_config, runner.get_model()
    found = find_runners(model, gate=wanted.gate)
    shares = shares_rows(found, config.parallel_config)
    role = _role(worker, config.parallel_config, shares)
    if hasattr(runner, _MARK) or not wants(wanted, role.rank):
        return
    if not found:
        say("this model has no MoE layers: nothing is recorded")
        return
    if config.parallel_config.enable_dbo:
        reason = "dual-batch overlap splits its steps between threads"
        found = [_refused(item, reason) for item in found]
    layers = sorted(
        [item.layer for item in found] + dense_layers(model, found), key=lambda layer: layer.index
    )
    # Where tensor-parallel ranks share rows out among themselves, the first expects them all.
    expects = role.tp == 0 or not shares
    stages = int(config.parallel_config.pipeline_parallel_size)
    session = open_session(
        wanted, layers, _model(runner), role, runner.device, expects=expects, stages=stages
    )
    offset = _rows_of(config.parallel_config, role, shares)
    for item in found:
        if session.capture is not None and not item.layer.unsupported:
            tap(item, _take(session, item.layer.index, offset))
    watch = Watch(session, role)
    setattr(runner, _MARK, watch)
    watch.around(runner)
    for message in session.recording.messages:
        say(message)
    say(f"recording rank {role.rank} in {wanted.out}")


def _refused(item: Any, reason: str) -> Any:
    from dataclasses import replace

    return replace(item, layer=replace(item.layer, unsupported=reason))


def shares_rows(found: Sequence[FoundRunner], parallel: Any) -> bool:
    """Whether tensor-parallel ranks share a batch's rows out among themselves.

    vLLM's settings may ask for it, but not every model does it: Mixtral does not.
    """
    configs = [getattr(item.runner, "moe_config", None) for item in found]
    return bool(parallel.use_sequence_parallel_moe) and all(
        config is None or bool(config.is_sequence_parallel) for config in configs
    )


def _role(worker: Any, parallel: Any, shares: bool) -> RankRole:
    """This worker's part; ranks are counted over all data-parallel engines."""
    from vllm.distributed import parallel_state

    dp = int(parallel.data_parallel_rank)
    size = int(parallel.world_size)
    tp = parallel_state.get_tp_group().rank_in_group
    try:
        ep = parallel_state.get_ep_group().rank_in_group
    except AssertionError:  # a model without expert parallelism has no such group
        ep = 0
    return RankRole(
        rank=dp * size + int(worker.rank),
        world_size=size * int(parallel.data_parallel_size),
        tp=tp,
        dp=dp,
        ep=ep,
        pp=parallel_state.get_pp_group().rank_in_group,
        owns_tokens=tp == 0 or shares,
    )


def _model(runner: Any) -> ModelInfo:
    import vllm

    config = runner.model_config
    return ModelInfo(
        name=str(config.model),
        model_type=str(config.hf_text_config.model_type),
        hidden_size=int(config.get_hidden_size()),
        expert_width=expert_width(config.hf_text_config),
        dtype=str(config.dtype).removeprefix("torch."),
        engine="vllm",
        engine_version=str(vllm.__version__),
        device=str(runner.device),
        config=configuration(config.hf_config),
    )


Cut = Callable[[int], tuple[int, int, int]]
"""Rows that a router sees to the start, stop and offset of ``own_rows``."""


def _rows_of(parallel: Any, role: RankRole, shares: bool) -> Cut | None:
    """None where routers see this rank's rows and no others."""
    if parallel.data_parallel_size == 1:
        return None

    def cut(tokens: int) -> tuple[int, int, int]:
        from vllm.forward_context import get_forward_context

        data_parallel = get_forward_context().dp_metadata
        if data_parallel is None:
            return 0, tokens, 0
        return own_rows(
            tokens,
            data_parallel.num_tokens_across_dp_cpu.tolist(),
            getattr(data_parallel, "local_sizes", None),
            role.dp,
            role.tp,
            int(parallel.tensor_parallel_size),
            shares,
        )

    return cut


def _take(session: Session, index: int, cut: Cut | None) -> Tap:
    """What a layer's router calls; it may be traced by a compiler."""
    capture, position = session.capture, session.positions[index]
    assert capture is not None

    def take(ids: Tensor, logits: Tensor | None, weights: Tensor | None) -> None:
        capture.count(position, ids, logits, weights)

    def take_own(ids: Tensor, logits: Tensor | None, weights: Tensor | None) -> None:
        try:
            start, stop, offset = cut(ids.shape[0])  # type: ignore[misc]
        except Exception as error:
            capture.failures.add(position, error)
            return
        logits = None if logits is None else logits[start:stop]
        weights = None if weights is None else weights[start:stop]
        capture.count(position, ids[start:stop], logits, weights, offset)

    return take if cut is None else take_own


@dataclass
class Watch:
    """Follows the steps of one model runner."""

    session: Session
    role: RankRole
    requests: Requests = field(default_factory=Requests)
    step: Step | None = None

    def around(self, runner: Any) -> None:
        """Open and close a step around each pass that the scheduler asks for."""
        execute_model = runner.execute_model

        @functools.wraps(execute_model)
        def execute_and_count(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if args[1:] or kwargs.get("dummy_run"):
                return execute_model(scheduler_output, *args, **kwargs)
            self.begin(scheduler_output)
            try:
                result = execute_model(scheduler_output, *args, **kwargs)
            except BaseException:
                self.end(failed=True)
                raise
            self.end()
            return result

        runner.execute_model = execute_and_count
        if self.session.settings.level == "tokens":
            self._follow_rows(runner)

    def begin(self, scheduler_output: Any) -> None:
        """Open the step that the scheduler asks for."""
        capture = self.session.capture
        if capture is None:
            return
        try:
            self.step = self.requests.read(scheduler_output)
            capture.facts = self.requests.facts()
            if self.step.tokens:
                capture.begin_pass(self.step.tokens, self.step.phase, len(self.step.scheduled))
        except Exception as error:
            capture.failures.add(-1, error)

    def end(self, *, failed: bool = False) -> None:
        """Close the step."""
        if self.session.capture is not None:
            self.session.capture.end_pass(failed=failed)

    def _follow_rows(self, runner: Any) -> None:
        """Learn the order of the batch where the runner fixes it."""
        second = hasattr(runner, "prepare_inputs")
        name = "prepare_inputs" if second else "_prepare_inputs"
        prepare = getattr(runner, name)

        @functools.wraps(prepare)
        def prepare_and_note(*args: Any, **kwargs: Any) -> Any:
            result = prepare(*args, **kwargs)
            capture = self.session.capture
            if capture is not None and self.step is not None:
                try:
                    order = (result if second else runner.input_batch).req_ids
                    capture.note_rows(*self.requests.rows(self.step, order))
                except Exception as error:
                    capture.failures.add(-1, error)
            return result

        setattr(runner, name, prepare_and_note)
