"""Routed experts in API responses, written by the engines' own encoders (see ``served.py``)."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import routeprof
from routeprof.errors import NotKnownError, RouteprofError, UsageError
from routeprof.formats import Told, convert
from routeprof.profile import Profile
from tests.formats.served import (
    DATA,
    EXPERTS,
    LAYERS,
    REQUESTS,
    TOP_K,
    Served,
    served,
    sglang_response,
)

SHAPE = Told(top_k=TOP_K, layers=LAYERS, experts=EXPERTS)


def npy(ids: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(file.getvalue()).decode()


def vllm(one: Served, **change: Any) -> dict[str, Any]:
    """A response of one choice, as vLLM writes it."""
    usage = {"prompt_tokens": one.prompt, "completion_tokens": one.made}
    if one.cached:
        usage["prompt_tokens_details"] = {"cached_tokens": one.cached}  # type: ignore[assignment]
    choice = {"index": 0, "routed_experts": npy(one.rows)}
    return {"model": "m", "choices": [choice], "usage": usage} | change


def written(path: Path, responses: Sequence[Any]) -> Path:
    path.write_text("\n".join(json.dumps(one) for one in responses) + "\n")
    return path


def loaded(path: Path, told: Told = SHAPE) -> Profile:
    return routeprof.load(convert([path], path.parent / f"run-{path.stem}", told=told))


def noted(profile: Profile, text: str) -> bool:
    return any(text in note for note in profile.info.notes)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_responses_that_the_engines_encoded(engine: str, tmp_path: Path):
    profile = routeprof.load(convert([DATA / f"{engine}.jsonl"], tmp_path / "run", told=SHAPE))
    assert profile.states == ("dense", *["captured"] * 3)
    assert np.array_equal(profile.counts, sum(one.counted() for one in REQUESTS)[1:])
    prefill = sum(one.counted(last=one.prompt) for one in REQUESTS)[1:]
    assert np.array_equal(profile.select(phase="prefill").counts, prefill)
    decode = sum(one.counted(first=one.prompt) for one in REQUESTS)[1:]
    assert np.array_equal(profile.select(phase="decode").counts, decode)
    table = profile.tokens(2)
    for number, one in enumerate(REQUESTS):
        mine = table.request == number
        first = max(one.start, one.cached)
        assert table.position[mine].tolist() == list(range(first, one.prompt + one.made - 1))
        assert np.array_equal(table.ids[mine], one.ids[first:, 2])
    requests = profile.requests().set_index("request")
    assert requests["decode_tokens"].tolist() == [one.made - 1 for one in REQUESTS]
    assert noted(profile, "4 rows are of prompt tokens in the prefix cache")
    assert noted(profile, "layers 0 have zeros alone")
    assert noted(profile, "3 responses do not say how much") == (engine == "vllm")


def test_nothing_is_said_of_steps(tmp_path: Path):
    profile = routeprof.load(convert([DATA / "vllm.jsonl"], tmp_path / "run"))
    rows = profile.layers()
    for name in ("steps", "step_imbalance_p50", "step_imbalance_max", "coverage"):
        assert rows[name].isna().all(), name
    assert not len(profile.overflow())
    assert not profile.has("steps")
    assert profile.has("tokens")
    for asked in (profile.steps, lambda: profile.overflow([1.3])):
        with pytest.raises(NotKnownError, match="which tokens ran together"):
            asked()
    assert noted(profile, "which of them ran together in a step of the engine")
    names = {path.stem for path in profile.write_csv(tmp_path / "csv")}
    assert "steps" not in names
    assert {"layers", "requests", "affinity", "transitions", "repetition"} <= names
    steps = routeprof.load(tmp_path / "run", DATA / "vllm.jsonl")
    assert not steps.has("steps")


def test_experts_are_what_tokens_chose_or_what_was_told(tmp_path: Path):
    highest = max(int(one.rows[..., 1:].max()) for one in REQUESTS)
    profile = routeprof.load(DATA / "vllm.jsonl")
    assert profile.info.layers[1].experts == highest + 1
    assert noted(profile, "does not say how many experts there are")
    more = routeprof.load(convert([DATA / "vllm.jsonl"], tmp_path / "a", told=Told(experts=20)))
    assert more.counts.shape == (3, 20)
    assert not noted(more, "does not say how many experts there are")
    few = routeprof.load(convert([DATA / "vllm.jsonl"], tmp_path / "b", told=Told(experts=10)))
    rows = few.layers()
    assert (rows["assignments"] + rows["invalid"]).tolist() == (rows["tokens"] * TOP_K).tolist()
    assert (rows["invalid"] > 0).all()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", ">i4"])
def test_dtypes_and_layouts(tmp_path: Path, dtype: str):
    one = REQUESTS[0]
    column_major = np.asfortranarray(one.ids.astype(dtype))
    change = {"choices": [{"index": 0, "routed_experts": npy(column_major)}]}
    profile = loaded(written(tmp_path / "a.jsonl", [vllm(one, **change)]))
    assert np.array_equal(profile.counts, one.counted()[1:])


def test_one_response_or_an_array_of_them(tmp_path: Path):
    due = sum(one.counted() for one in REQUESTS)[1:]
    array, single = tmp_path / "a.json", tmp_path / "b.json"
    array.write_text(json.dumps([vllm(one) for one in REQUESTS], indent=1))
    single.write_text(json.dumps(vllm(REQUESTS[0]), indent=1))
    assert np.array_equal(loaded(array).counts, due)
    assert np.array_equal(loaded(single).counts, REQUESTS[0].counted()[1:])


def test_older_responses_have_lists_and_the_prompt_apart(tmp_path: Path):
    one = REQUESTS[0]
    lists = one.ids.tolist()
    apart = vllm(
        one,
        prompt_routed_experts=lists[: one.prompt],
        choices=[{"index": 0, "routed_experts": lists[one.prompt :]}],
    )
    whole = vllm(one, prompt_routed_experts=None, choices=[{"routed_experts": lists}])
    for name, response in (("apart", apart), ("whole", whole)):
        profile = loaded(written(tmp_path / f"{name}.jsonl", [response]))
        prefill = profile.select(phase="prefill").counts
        assert np.array_equal(profile.counts, one.counted()[1:])
        assert np.array_equal(prefill, one.counted(last=one.prompt)[1:])
        assert profile.tokens(1).position.tolist() == list(range(len(one.ids)))


def test_choices_of_one_request_share_the_prompt(tmp_path: Path):
    first, second = served(6, 4, 7), served(6, 3, 8)
    response = vllm(first, choices=[{"routed_experts": npy(one.ids)} for one in (first, second)])
    response["usage"]["completion_tokens"] = first.made + second.made
    profile = loaded(written(tmp_path / "a.jsonl", [response]))
    due = first.counted() + second.counted(first=6)
    assert np.array_equal(profile.counts, due[1:])
    assert noted(profile, "6 prompt rows of further choices")


def test_without_usage_the_phase_is_not_known(tmp_path: Path):
    responses = [vllm(one) for one in REQUESTS]
    del responses[0]["usage"]
    profile = loaded(written(tmp_path / "a.jsonl", responses))
    unknown = profile.select(phase="unknown").counts
    assert np.array_equal(unknown, REQUESTS[0].counted()[1:])
    assert noted(profile, "1 responses do not say how long the prompt was")


def test_zero_rows_are_not_expert_zero(tmp_path: Path):
    """As tpu-inference 3583 filled the prompt, and as layers that are not captured look."""
    one = REQUESTS[0]
    ids = one.ids.copy()
    ids[:4] = 0
    ids[5, 2] = 0
    profile = loaded(written(tmp_path / "a.jsonl", [vllm(replace(one, ids=ids))]))
    rows = profile.layers().set_index("layer")
    assert rows["tokens"].tolist() == [len(ids) - 4] * 3
    assert rows["invalid"].tolist() == [0, TOP_K, 0]
    due = one.counted(first=4)
    for expert in one.ids[5, 2]:
        due[2, expert] -= 1
    assert np.array_equal(profile.counts, due[1:])
    assert noted(profile, "4 rows are zeros in every layer")
    assert noted(profile, "1 choices are zeros in some layers")


def test_with_one_expert_a_token_zero_may_be_a_choice(tmp_path: Path):
    ids = np.random.default_rng(1).integers(0, 3, (9, 3, 1), dtype=np.uint8)
    ids[:, 0] = 0
    response = vllm(Served(6, 4, ids))
    profile = loaded(written(tmp_path / "a.jsonl", [response]), Told(experts=3))
    due = [np.bincount(ids[:, layer, 0], minlength=3).tolist() for layer in (1, 2)]
    assert profile.counts.tolist() == due


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (Told(), "come without a shape"),
        (Told(top_k=TOP_K), "come without a shape"),
        (Told(layers=LAYERS), "come without a shape"),
        (Told(top_k=TOP_K, layers=5), "no whole tokens"),
        (Told(top_k=2 * TOP_K, layers=LAYERS // 2), "choose an expert twice"),
        (Told(top_k=TOP_K, layers=2), "more than 9 tokens of prompt and 5"),
        (Told(top_k=0, layers=2), "top_k is 0: pass 1 or more"),
    ],
)
def test_sglang_must_be_told_its_shape(tmp_path: Path, told: Told, says: str):
    with pytest.raises(UsageError, match=says):
        convert([DATA / "sglang.jsonl"], tmp_path / "run", told=told)


def test_sglang_through_its_openai_server(tmp_path: Path):
    one = REQUESTS[3]
    text = base64.b64encode(one.rows.astype("<i4").tobytes()).decode()
    meta = sglang_response(one, text)["meta_info"]
    response = {"choices": [{"index": 0, "meta_info": meta}], "usage": {"prompt_tokens": 7}}
    profile = loaded(written(tmp_path / "a.jsonl", [response]))
    assert np.array_equal(profile.counts, one.counted()[1:])


GOOD = vllm(REQUESTS[0])


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (GOOD | {"choices": [{"routed_experts": "@@"}]}, "no base64"),
        (GOOD | {"choices": [{"routed_experts": [[1, 2], [3]]}]}, "no response with routed"),
        (GOOD | {"choices": [{"routed_experts": [[[1.5]]]}]}, "ids are float64"),
        (GOOD | {"choices": [{"routed_experts": [[1, 2]]}]}, r"of shape \(1, 2\)"),
        (GOOD | {"choices": [{"routed_experts": {"a": 1}}]}, "ids are object"),
        (GOOD | {"choices": [{"routed_experts": None}]}, "no routed experts but zeros"),
        (GOOD | {"choices": [{"routed_experts": [[[0, 0]]] * 3}]}, "no routed experts but zeros"),
        (GOOD | {"choices": [{"routed_experts": [[[0, 2**40]]]}]}, "which cannot be"),
        (GOOD | {"choices": [7]}, "no response with routed"),
        (GOOD | {"choices": None}, "no response with routed"),
        (GOOD | {"usage": {"prompt_tokens": -1}}, "no response with routed"),
        (GOOD | {"usage": {"prompt_tokens": 1, "completion_tokens": 2}}, "are more than 1 tokens"),
        ({"meta_info": {"routed_experts": 7}}, "no response with routed"),
        ({"object": "error", "say": "routed_experts"}, "no response with routed"),
        ([1, "routed_experts"], "no JSON object"),
    ],
)
def test_bad_responses(tmp_path: Path, response: Any, says: str):
    path = written(tmp_path / "a.jsonl", [response, {"routed_experts": 1}][:1])
    with pytest.raises(RouteprofError, match=says) as error:
        convert([path], tmp_path / "run", "responses")
    assert "\n" not in str(error.value)


def test_a_response_without_rows_is_left_out(tmp_path: Path):
    none = Served(1, 1, np.zeros((0, LAYERS, TOP_K), dtype=np.uint8))
    path = written(tmp_path / "a.jsonl", [vllm(none), vllm(REQUESTS[0]), vllm(none)])
    assert np.array_equal(loaded(path).counts, REQUESTS[0].counted()[1:])


def test_different_models(tmp_path: Path):
    other = Served(2, 2, np.tile(np.arange(5, dtype=np.uint8), (3, LAYERS, 1)))
    path = written(tmp_path / "a.jsonl", [vllm(REQUESTS[0]), vllm(other)])
    with pytest.raises(UsageError, match="different models"):
        routeprof.load(path)


@pytest.mark.parametrize("cut", [1, 60, 500, 1000, 2000, 3000])
def test_truncated_responses(tmp_path: Path, cut: int):
    path = tmp_path / "a.jsonl"
    path.write_bytes((DATA / "vllm.jsonl").read_bytes()[:cut])
    with pytest.raises(UsageError, match="is no JSON"):
        convert([path], tmp_path / "run", "responses")


def array_file(shape: str, body: bytes, version: int = 1, kind: str = "|u1") -> str:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    start = b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(2 * version, "little")
    return base64.b64encode(start + header + body).decode()


@pytest.mark.parametrize(
    "text",
    [
        array_file("(1000000000, 1000000000, 8)", b"abc"),
        array_file("(3,)", b"abcd"),
        array_file("(1, 1, 3)", b"abc", version=9),
        array_file("(1, 1, " + "9" * 5000 + ")", b"abc"),
        array_file("(1, 1, 3)", bytes(24), kind="|O"),
        array_file("(1, 1, __import__('os').system('true'))", b"abc"),
        base64.b64encode(b"\x93NUMPY").decode(),
    ],
)
def test_hostile_arrays(tmp_path: Path, text: str):
    path = written(tmp_path / "a.jsonl", [GOOD | {"choices": [{"routed_experts": text}]}])
    with pytest.raises(UsageError, match="no response with routed") as error:
        routeprof.load(path)
    assert "\n" not in str(error.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_flipped_bytes_are_read_or_refused(tmp_path: Path, data: st.DataObject):
    from routeprof.formats import read

    content = bytearray((DATA / "vllm.jsonl").read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "b.jsonl").write_bytes(content)
    try:
        source = read([tmp_path / "b.jsonl"], "responses")
        assert list(source.steps)
    except RouteprofError as error:
        assert "\n" not in str(error)  # noqa: PT017
