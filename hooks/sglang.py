"""The SGLang plugin: records every scheduler of an engine that ``routeprof run`` started.

SGLang loads it in all its processes (entry point ``sglang.srt.plugins``). Unless the environment
asks for a recording it returns at once. Everything goes through SGLang's own hook registry:

* when a model runner has its model, before anything is compiled or captured, its layers are
  listed and each TopK configuration is told where its ids go;
* ids are read where routing is decided and not yet mapped to physical slots: they are logical
  experts, whatever EPLB does, and whether SGLang's own recorder is on or off. Columns of fused
  shared experts, which stand behind the routed ones, are left out;
* steps are opened and closed around ``ModelRunner.forward``, which warm-up, dummy and capture
  runs do not go through, or without a request to serve.

Where experts may sit elsewhere than in order, ``placements.json`` beside the rank's parts has one
entry for every map that came into force: ``time``, seconds since the epoch; ``ep_size``; and
``physical_to_logical``, for each layer of the model (dense ones too) the logical expert of each
slot. Before the first entry they sit in order.

A draft model's runner is left alone: its layers are neither listed nor counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeprof.capture import clock
from routeprof.hooks.configuration import configuration
from routeprof.hooks.session import Session, Settings, open_session, say, settings, wants
from routeprof.hooks.sglang_steps import Requests, read_step
from routeprof.hooks.widths import expert_width
from routeprof.topology import Layer, ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

    from routeprof.hooks.sglang_layers import Found, Rows

_MARK = "_routeprof"
"""Attribute for what is ours on SGLang's objects."""

PLACEMENTS_FILE = "placements.json"
STOP_SECONDS = 15.0
"""How long the end of an engine waits for its recording to be whole."""


def register() -> None:
    """Entry point: make the model runners of this process record, if that is asked for."""
    try:
        wanted = settings()
        if wanted is not None:
            _watch(wanted)
    except Exception as error:
        say(f"SGLang is not recorded: {error}")


def _watch(wanted: Settings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if hasattr(HookRegistry, _MARK):
        return
    setattr(HookRegistry, _MARK, True)
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    topk = "sglang.srt.layers.moe.topk"
    updater = "sglang.srt.eplb.expert_location_updater.ExpertLocationUpdater"
    hooks: list[tuple[str, Callable[..., Any], HookType]] = [
        (f"{runner}.initialize", partial(_initialized, wanted), HookType.AFTER),
        (f"{runner}.forward", _forward, HookType.AROUND),
        (f"{topk}._post_process_topk_ids", _routed, HookType.BEFORE),
        (f"{topk}.build_precomputed_topk_output", _precomputed, HookType.BEFORE),
        (f"{updater}.update", _placed, HookType.AFTER),
        ("sglang.srt.utils.common.kill_process_tree", partial(_ending, wanted), HookType.BEFORE),
    ]
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)


# -- what SGLang calls


def _initialized(wanted: Settings, result: Any, runner: Any) -> None:
    try:
        attach(runner, wanted)
    except Exception as error:
        say(f"SGLang is not recorded: {error}")


def _forward(forward: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    watch: Watch | None = getattr(runner, _MARK, None)
    if watch is None:
        return forward(runner, *args, **kwargs)
    watch.begin(args[0] if args else kwargs.get("forward_batch"))
    try:
        result = forward(runner, *args, **kwargs)
    except BaseException:
        watch.end(failed=True)
        raise
    watch.end()
    return result


# The next two may be traced by a compiler, and have to be simple.


def _routed(
    topk_ids: Tensor,
    topk_weights: Tensor,
    topk_config: Any,
    router_logits: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    take: Take | None = getattr(topk_config, _MARK, None)
    if take is not None:
        take(topk_ids, topk_weights, router_logits)


def _precomputed(
    topk_weights: Tensor, topk_ids: Tensor, topk_config: Any, *args: Any, **kwargs: Any
) -> None:
    take: Take | None = getattr(topk_config, _MARK, None)
    if take is not None:
        take(topk_ids, topk_weights, None)


def _placed(result: Any, *args: Any, **kwargs: Any) -> None:
    for watch in _watches:
        watch.note_placement()


def _ending(wanted: Settings, parent_pid: int | None = None, *args: Any, **kwargs: Any) -> None:
    """SGLang ends its processes by SIGKILL: have what they recorded written before."""
    import psutil  # type: ignore[import-untyped]

    from routeprof.capture.control import answered, is_alive, rank_states, request, wait_for
    from routeprof.errors import NotARecordingError

    try:
        states = rank_states(wanted.out).values()
        doomed = {child.pid for child in psutil.Process(parent_pid).children(recursive=True)}
        if any(state.pid in doomed and state.state != "stopped" for state in states):
            number = request(wanted.out, "stopped")
            last = wait_for(wanted.out, number, STOP_SECONDS).values()
            if any(is_alive(state) and not answered(state, number) for state in last):
                say(f"the end of the recording may be missing: not written in {STOP_SECONDS:.0f} s")
    except NotARecordingError:
        return  # the engine ends before it began
    except Exception as error:
        say(f"the end of the recording may be missing: {error}")


# -- a runner whose model is loaded

_watches: list[Watch] = []

Take = Callable[["Tensor", "Tensor", "Tensor | None"], None]
"""Called with ids and weights [tokens, k or more], and logits [tokens, experts] or None."""


def attach(runner: Any, wanted: Settings) -> None:
    """Tap the routers of a model runner's model and record its steps.

    Raises:
        RecordingExistsError: the directory holds something already.
    """
    from sglang.srt.runtime_context import get_parallel

    from routeprof.hooks.sglang_layers import dense_layers, find_layers, rank_role, rows_seen

    role = rank_role()
    if runner.is_draft_worker or hasattr(runner, _MARK) or not wants(wanted, role.rank):
        return
    found = find_layers(runner.model, runner.model_config.hf_text_config, gate=wanted.gate)
    if not found:
        say("this model has no MoE layers: nothing is recorded")
        return
    rows = rows_seen()
    if rows.unsupported:
        found = [_refused(item, rows.unsupported) for item in found]
    held = runner.layer_info
    dense = dense_layers(held.start_layer, held.end_layer, found)
    session = open_session(
        wanted,
        sorted([item.layer for item in found] + dense, key=lambda layer: layer.index),
        _model(runner),
        role,
        _device(runner),
        # Where ranks share rows out among themselves, the first expects them all.
        expects=rows.shard == 0,
        stages=int(get_parallel().pp_size),
    )
    for item in found:
        if not item.layer.unsupported:
            setattr(item.config, _MARK, _take(session, item.layer, rows))
    watch = Watch(session, wanted.out / f"rank-{role.rank:05d}" / PLACEMENTS_FILE)
    setattr(runner, _MARK, watch)
    _watches.append(watch)
    watch.note_placement()
    for message in session.recording.messages:
        say(message)
    say(f"recording rank {role.rank} in {wanted.out}")


def _refused(item: Found, reason: str) -> Found:
    return replace(item, layer=replace(item.layer, unsupported=reason))


def _device(runner: Any) -> Any:
    """The runner's device, with its number."""
    import torch

    return torch.empty(0, device=runner.device).device


def _model(runner: Any) -> ModelInfo:
    import sglang

    config = runner.model_config
    return ModelInfo(
        name=str(config.model_path),
        model_type=str(config.hf_text_config.model_type),
        hidden_size=int(config.hidden_size),
        expert_width=expert_width(config.hf_text_config),
        dtype=str(config.dtype).removeprefix("torch."),
        engine="sglang",
        engine_version=str(sglang.__version__),
        device=str(_device(runner)),
        config=configuration(config.hf_config),
    )


def _take(session: Session, layer: Layer, rows: Rows) -> Take:
    """What a layer's router calls; it may be traced by a compiler."""
    capture, position = session.capture, session.positions[layer.index]
    assert capture is not None
    top_k, experts, shard = layer.top_k, layer.experts, rows.shard
    gated = layer.gate == "logits"

    def take(ids: Tensor, weights: Tensor, logits: Tensor | None) -> None:
        try:
            tokens = ids.shape[0]
            # Some routers hand on an empty placeholder.
            if not gated or logits is None or logits.shape != (tokens, experts):
                logits = None
            # The pass began so many rows before the first that this rank sees.
            offset = -shard * tokens
            capture.count(position, ids[:, :top_k], logits, weights[:, :top_k], offset)
        except Exception as error:
            capture.failures.add(position, error)

    return take


@dataclass
class Watch:
    """Follows the steps of one model runner.

    Attributes:
        placements: the file for maps of experts to slots.
    """

    session: Session
    placements: Path
    requests: Requests = field(default_factory=Requests)
    _noted: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, batch: Any) -> None:
        """Open the step that a ForwardBatch is, if it is one."""
        capture = self.session.capture
        if capture is None:
            return
        try:
            step = read_step(batch)
            if step is None:
                return
            cached = self.requests.follow(batch)
            if not capture.enabled:
                return
            if cached:
                cached += capture.facts.get("prefix_cached_tokens", 0)
                capture.facts = {"prefix_cached_tokens": cached}
            if step.phase is None:
                capture.missed += 1
                capture.missed_tokens += step.rows
                return
            capture.begin_pass(step.rows, step.phase, step.requests)
            if self.session.settings.level == "tokens":
                rows = self.requests.rows(batch, step.rows)
                if rows is not None:
                    capture.note_rows(*rows)
        except Exception as error:
            capture.failures.add(-1, error)

    def end(self, *, failed: bool = False) -> None:
        """Close the step."""
        if self.session.capture is not None:
            self.session.capture.end_pass(failed=failed)

    def note_placement(self) -> None:
        """Write the map that is in force from now on, unless experts simply sit in order.

        This happens at the start, and while experts move: SGLang serves nothing meanwhile.
        """
        try:
            self._note_placement()
        except Exception as error:
            say(f"a placement of experts is not noted: {error}")

    def _note_placement(self) -> None:
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

        from routeprof.recording.writer import write_whole

        metadata = get_global_expert_location_metadata()
        if metadata is None:
            return
        slots = metadata.physical_to_logical_map_cpu.tolist()
        in_order = all(row == list(range(metadata.num_logical_experts)) for row in slots)
        if in_order and not self._noted:
            return
        now = {"time": clock.now(), "ep_size": metadata.ep_size, "physical_to_logical": slots}
        self._noted.append(now)
        write_whole(self.placements, json.dumps(self._noted))
