"""Errors against a table of all 256 E4M3 values and torch's own cast; ranges; planted outliers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routeprof.plan import weights as plan_weights
from routeprof.plan.audit import groups as batches
from routeprof.plan.audit import strips
from routeprof.plan.audit.grids import GROUP, TOP, Scratch, round_e4m3
from routeprof.plan.audit.options import SCHEME_OF
from routeprof.plan.audit.strips import spread
from routeprof.plan.audit.verdicts import verdicts
from routeprof.plan.precision import FORMATS
from routeprof.plan.weights import SCHEMES, Audit, MatrixAudit, audit
from tests.plan.checkpoints import Weights, gaussian, save, save_sharded

# -- the oracle


def e4m3_values() -> np.ndarray:
    """By the definition: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinity."""
    values = []
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        size = (
            mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
        values.append(np.nan if code & 127 == 127 else -size if sign else size)
    return np.array(values)


TABLE = e4m3_values()[:127]
"""From 0 to 448, by code."""

TOPS = {"int8-group": 127.0, "int4-group": 7.0}


def nearest(x: np.ndarray) -> np.ndarray:
    """The nearest E4M3 value; of two as near, the one with the even code."""
    above = np.searchsorted(TABLE, np.abs(x)).clip(1, len(TABLE) - 1)
    down, up = np.abs(x) - TABLE[above - 1], TABLE[above] - np.abs(x)
    code = np.where((down < up) | ((down == up) & (above % 2 == 1)), above - 1, above)
    return np.copysign(TABLE[code], x)


def blocks(x: np.ndarray) -> np.ndarray:
    """The largest absolute value of each element's block of 128 x 128."""
    found = np.empty_like(x)
    for row in range(0, x.shape[0], 128):
        for column in range(0, x.shape[1], 128):
            cut = np.s_[row : row + 128, column : column + 128]
            found[cut] = np.abs(x[cut]).max()
    return found


def groups(x: np.ndarray) -> np.ndarray:
    found = np.empty_like(x)
    for column in range(0, x.shape[1], 128):
        cut = np.s_[:, column : column + 128]
        found[cut] = np.abs(x[cut]).max(axis=1, keepdims=True)
    return found


def peaks(scheme: str, x: np.ndarray, experts: list[np.ndarray]) -> np.ndarray | float:
    tops = [np.abs(one).max() for one in experts]
    match scheme:
        case "fp8-unscaled":
            return 448.0
        case "fp8-median":
            return float(np.median(tops))
        case "fp8-tensor":
            return max(tops)
        case "fp8-expert":
            return np.abs(x).max()
        case "fp8-channel":
            return np.abs(x).max(axis=1, keepdims=True)
        case "fp8-block":
            return blocks(x)
    return groups(x)


def expected(scheme: str, x: np.ndarray, experts: list[np.ndarray]) -> tuple[float, float, float]:
    """Relative error, saturated and underflow of one expert, all in float64."""
    peak = np.asarray(peaks(scheme, x, experts))
    top = TOPS.get(scheme, 448.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.where(peak > 0, x * (top / peak), 0.0)
    rounded = np.rint(y) if scheme.startswith("int") else nearest(y)
    back = rounded * peak / top
    error = np.sqrt(((back - x) ** 2).sum() / (x**2).sum())
    return error, (np.abs(y) > 464).mean(), ((rounded == 0) & (x != 0)).mean()


def check(matrix: MatrixAudit, experts: list[np.ndarray]) -> None:
    for expert, x in enumerate(experts):
        assert matrix.largest[expert] == np.abs(x).max()
        rms = np.sqrt((x**2).mean())
        assert matrix.rms[expert] == pytest.approx(rms, rel=1e-6)
        assert matrix.outlier_ratio[expert] == pytest.approx(np.abs(x).max() / rms, rel=1e-6)
        assert matrix.outlier_share[expert] == (np.abs(x) > 6 * rms).mean()
        for place, scheme in enumerate(SCHEMES):
            error, saturated, underflow = expected(scheme, x, experts)
            assert matrix.error[place, expert] == pytest.approx(error, rel=2e-5, abs=2e-7), scheme
            # One value on a tie, which a scale's last bit decides, may fall to either side.
            one = 1.5 / x.size
            assert matrix.saturated[place, expert] == pytest.approx(saturated, abs=one), scheme
            assert matrix.underflow[place, expert] == pytest.approx(underflow, abs=one), scheme


def of(weights: Weights, matrix: MatrixAudit) -> list[np.ndarray]:
    return [
        weights[f"{matrix.layer}.experts.{expert}.{matrix.name}.weight"].double().numpy()
        for expert in range(matrix.experts)
    ]


# -- rounding


def rounded(values: torch.Tensor) -> torch.Tensor:
    scratch = Scratch(values * 512, torch.empty_like(values), torch.empty_like(values))
    round_e4m3(scratch)
    assert torch.equal(scratch.rounded + scratch.value, values * 512)
    return scratch.rounded / 512


def test_rounding_is_torchs_cast_for_every_bfloat16_in_range():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = every[every.abs() <= 464]
    assert torch.equal(rounded(values), values.to(torch.float8_e4m3fn).float())


@given(st.lists(st.floats(-464, 464, width=32), min_size=1, max_size=50))
def test_rounding_is_torchs_cast_and_the_nearest_of_the_table(numbers: list[float]):
    values = torch.tensor(numbers)
    values = values[(values.abs() > 1e-30) | (values == 0)]
    assert torch.equal(rounded(values), values.to(torch.float8_e4m3fn).float())
    exact = values.double().numpy()
    error = np.abs(rounded(values).double().numpy() - exact)
    np.testing.assert_array_equal(error, np.abs(nearest(exact) - exact))


def test_the_table_is_what_torch_calls_e4m3():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(codes.float().numpy(), e4m3_values())
    assert TABLE.max() * 512 == TOP


# -- errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_are_those_of_a_round_trip(tmp_path: Path, dtype: torch.dtype):
    weights = gaussian(dtype=dtype)
    weights["model.layers.1.mlp.experts.2.up_proj.weight"][7] *= 300
    weights["model.layers.1.mlp.experts.3.up_proj.weight"][:, 150] = 0
    done = audit(save(weights, tmp_path))
    assert [(one.index, one.name) for one in done.matrices] == [
        (layer, name) for layer in (0, 1) for name in ("down_proj", "gate_proj", "up_proj")
    ]
    for matrix in done.matrices:
        check(matrix, of(weights, matrix))


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 700)),
    spread=st.integers(-12, 12),
    seed=st.integers(0, 99),
)
def test_any_shape(tmp_path_factory, shape: tuple[int, int], spread: int, seed: int):
    weights = gaussian(2, 1, shape, seed=seed, sigma=2.0**spread)
    done = audit(save(weights, tmp_path_factory.mktemp("any")), threads=1)
    for matrix in done.matrices:
        check(matrix, of(weights, matrix))


def test_torchs_round_trip_itself(tmp_path: Path):
    weights = gaussian(3, 1)
    (matrix,) = [one for one in audit(save(weights, tmp_path)).matrices if one.name == "up_proj"]
    for expert, x in enumerate(map(torch.from_numpy, of(weights, matrix))):
        scale = x.abs().amax(dim=1, keepdim=True) / 448
        back = (x / scale).float().to(torch.float8_e4m3fn).double() * scale
        error = float((back - x).norm() / x.norm())
        assert matrix.of("fp8-channel")[expert] == pytest.approx(error, rel=1e-5)


def test_an_expert_of_zeros_has_no_relative_error(tmp_path: Path):
    weights = gaussian(3, 1)
    weights["model.layers.0.mlp.experts.1.up_proj.weight"].zero_()
    matrix = audit(save(weights, tmp_path)).matrices[-1]
    assert matrix.largest[1] == matrix.rms[1] == 0
    assert np.isnan(matrix.error[:, 1]).all()
    assert not np.isnan(matrix.error[:, [0, 2]]).any()


def test_what_is_not_finite_is_counted_and_hides_only_its_expert(tmp_path: Path):
    weights = gaussian(4, 1)
    for place in (0, 140):
        weights["model.layers.0.mlp.experts.2.up_proj.weight"][place, 5] = float("nan")
    weights["model.layers.0.mlp.experts.2.up_proj.weight"][1, 1] = float("inf")
    matrix = audit(save(weights, tmp_path)).matrices[-1]
    assert matrix.broken.tolist() == [0, 0, 3, 0]
    assert np.isnan(matrix.error[:, 2]).all()
    assert np.isnan(matrix.largest[2])
    others = [x for expert, x in enumerate(of(weights, matrix)) if expert != 2]
    for place, scheme in enumerate(SCHEMES):
        error = expected(scheme, others[0], others)[0]
        assert matrix.error[place, 0] == pytest.approx(error, rel=2e-5)


# -- sampling, threads, layouts


def test_a_sample_keeps_maxima_and_estimates_errors(tmp_path: Path):
    weights = gaussian(3, 1, (1024, 2048))
    directory = save(weights, tmp_path)
    exact, sampled = audit(directory), audit(directory, sample=8)
    for all_of_it, part in zip(exact.matrices, sampled.matrices, strict=True):
        np.testing.assert_array_equal(part.largest, all_of_it.largest)
        assert (part.error != all_of_it.error).any()
        # Not for casting a few values that become zero.
        np.testing.assert_allclose(part.error, all_of_it.error, rtol=0.02)
        np.testing.assert_allclose(part.rms, all_of_it.rms, rtol=0.01)


def sampled(scheme: str, x: np.ndarray, sample: int) -> tuple[float, float]:
    """Error and underflow of the groups that a sample meets, under scales of all elements."""
    across = -(-x.shape[1] // GROUP)
    number = np.arange(x.shape[0])[:, None] * across + np.arange(x.shape[1]) // GROUP
    seen = np.isin(number, spread(x.shape[0] * across, sample))
    peak, top = np.asarray(peaks(scheme, x, [x])), TOPS.get(scheme, 448.0)
    y = x * (top / peak)
    back = np.rint(y) if scheme.startswith("int") else nearest(y)
    lost = ((back * peak / top - x) ** 2)[seen].sum()
    return np.sqrt(lost / (x[seen] ** 2).sum()), ((back == 0) & (x != 0))[seen].mean()


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sample_is_of_these_groups_under_the_scales_of_all(
    tmp_path: Path, dtype: torch.dtype, turn: bool
):
    x = torch.randn(300, 330) * torch.rand(300, 1) * torch.rand(330)
    x[:, 128:256].abs_().neg_()
    x = x.to(dtype)
    stack = {"model.layers.0.mlp.experts.up_proj": (x.T if turn else x).contiguous()[None]}
    directory = save(stack, tmp_path, {"hidden_size": 330})
    matrix = audit(directory, sample=5).matrices[0]
    exact = x.double().numpy()
    assert (matrix.outputs, matrix.inputs) == (300, 330)
    assert matrix.largest[0] == np.abs(exact).max()
    for scheme in SCHEMES[3:]:
        error, underflow = sampled(scheme, exact, 5)
        place = SCHEMES.index(scheme)
        assert matrix.error[place, 0] == pytest.approx(error, rel=2e-5), scheme
        assert matrix.underflow[place, 0] == pytest.approx(underflow, abs=1e-4), scheme


@pytest.mark.parametrize(("groups", "across", "sample"), [(16384, 16, 32), (9000, 9, 16)])
def test_a_sample_meets_all_outputs_and_inputs_alike(groups: int, across: int, sample: int):
    chosen = spread(groups, sample)
    assert chosen[0] == 0
    np.testing.assert_array_equal(chosen // sample, np.arange(len(chosen)))
    assert len(chosen) >= groups // sample
    columns = np.bincount(chosen % across, minlength=across)
    assert columns.min() >= 0.8 * columns.max()
    assert np.bincount(chosen // across).max() <= -(-across // sample) + 1


def test_strips_and_batches_of_any_size_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weights = gaussian(5, 1, (300, 700))
    weights["model.layers.0.mlp.experts.3.up_proj.weight"].abs_().neg_()
    weights["model.layers.0.mlp.experts.4.up_proj.weight"].abs_()
    monkeypatch.setattr(strips, "STRIP", 1)
    monkeypatch.setattr(strips, "WAITING", 500)
    monkeypatch.setattr(plan_weights, "BUNDLE", 2 * 300 * 700 * 2)
    monkeypatch.setattr(batches, "AT_ONCE", 70)
    monkeypatch.setattr(batches, "COUNTED", 30 * GROUP)
    told: list[int] = []
    done = audit(save(weights, tmp_path), threads=2, advance=told.append)
    for matrix in done.matrices:
        check(matrix, of(weights, matrix))
    assert [one // (2 * 300 * 700) for one in told] == [2, 2, 1] * 3
    assert sum(told) == done.read


@pytest.mark.parametrize("turn", [False, True])
def test_not_finite_is_counted_in_every_strip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: bool
):
    stack = torch.randn(2, 300, 200).bfloat16()
    for row, column, value in ((0, 0, "nan"), (140, 199, "-inf"), (299, 7, "inf"), (299, 8, "nan")):
        stack[1, row, column] = float(value)
    stack[1, 299, 8] = -stack[1, 299, 8]
    stack = stack.transpose(1, 2).contiguous() if turn else stack
    name = "model.layers.0.mlp.experts.up_proj"
    monkeypatch.setattr(strips, "STRIP", 1)
    (matrix,) = audit(save({name: stack}, tmp_path, {"hidden_size": 200}), sample=64).matrices
    assert matrix.broken.tolist() == [0, 4]


def test_threads_and_shards_change_nothing(tmp_path: Path):
    weights = gaussian()
    one = audit(save(weights, tmp_path / "one"), threads=1)
    told: list[int] = []
    many = audit(save_sharded(weights, tmp_path / "many"), threads=4, advance=told.append)
    for left, right in zip(one.matrices, many.matrices, strict=True):
        np.testing.assert_array_equal(left.error, right.error)
        np.testing.assert_array_equal(left.largest, right.largest)
    assert sum(told) == many.read == sum(tensor.nbytes for tensor in weights.values())


def test_threads_of_torch_are_as_before(tmp_path: Path):
    before = torch.get_num_threads()
    audit(save(gaussian(2, 1), tmp_path))
    assert torch.get_num_threads() == before


def same(left: MatrixAudit, right: MatrixAudit) -> bool:
    return (left.outputs, left.inputs) == (right.outputs, right.inputs) and np.array_equal(
        left.error, right.error
    )


def stacked(weights: Weights, name: str, turn: bool) -> torch.Tensor:
    tensors = [tensor for key, tensor in weights.items() if key.endswith(f".{name}.weight")]
    whole = torch.stack(tensors)
    return whole.transpose(1, 2).contiguous() if turn else whole


@pytest.mark.parametrize("turn", [False, True])
def test_stacked_experts_either_way_round(tmp_path: Path, turn: bool):
    weights = gaussian(5, 1, (150, 200))
    one_each = audit(save(weights, tmp_path / "each"))
    layer = "model.layers.0.mlp.experts"
    tensors = {
        f"{layer}.gate_up_proj": stacked(weights, "up_proj", turn),
        f"{layer}.down_proj": stacked(weights, "down_proj", turn),
        f"{layer}.down_proj_bias": torch.zeros(5, 200),
    }
    done = audit(save(tensors, tmp_path / "stack", {"text_config": {"hidden_size": 200}}))
    assert [one.name for one in done.matrices] == ["down_proj", "gate_up_proj"]
    assert same(done.matrices[0], one_each.matrices[0])
    assert same(done.matrices[1], one_each.matrices[2])


def test_square_matrices_go_by_the_models_type(tmp_path: Path):
    tensor = gaussian(1, 1, (64, 64))["model.layers.0.mlp.experts.0.up_proj.weight"]
    tensor[3] *= 1000
    stack = {"model.layers.0.mlp.experts.gate_up_proj": tensor.T.contiguous()[None]}
    config = {"hidden_size": 64, "model_type": "gpt_oss"}
    turned = audit(save(stack, tmp_path / "turned", config)).matrices[0]
    plain = audit(save({"model.layers.0.mlp.experts.gate_up_proj": tensor[None]}, tmp_path / "p"))
    assert same(turned, plain.matrices[0])


NAMES = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.{}.w1.weight",
    "jamba": "model.layers.0.feed_forward.experts.{}.gate_proj.weight",
    "switch": "encoder.block.0.layer.1.mlp.experts.expert_{}.wi.weight",
    "nemotron": "backbone.layers.0.mixer.experts.{}.up_proj.weight",
    "llama": "language_model.model.layers.0.feed_forward.experts.{}.up_proj.weight",
}


@pytest.mark.parametrize("family", NAMES)
def test_names_of_families(tmp_path: Path, family: str):
    plain = gaussian(3, 1)
    name = NAMES[family]
    tensors = {
        name.format(expert): plain[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"]
        for expert in range(3)
    }
    tensors["model.layers.0.mlp.shared_experts.up_proj.weight"] = torch.ones(4, 4)
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(4, 4)
    (matrix,) = audit(save(tensors, tmp_path)).matrices
    assert (matrix.index, matrix.experts) == (0, 3)
    check(matrix, [tensors[name.format(expert)].double().numpy() for expert in range(3)])


def test_dbrx_and_granite(tmp_path: Path):
    plain = gaussian(4, 1, (96, 128))
    stack = stacked(plain, "up_proj", False)
    dbrx = {"transformer.blocks.0.ffn.experts.mlp.w1": stack.reshape(-1, 128)}
    config = {"d_model": 128, "ffn_config": {"moe_num_experts": 4}}
    granite = {"model.layers.0.block_sparse_moe.input_linear.weight": stack}
    for number, (tensors, own) in enumerate(((dbrx, config), (granite, {"hidden_size": 128}))):
        (matrix,) = audit(save(tensors, tmp_path / str(number), own)).matrices
        check(matrix, list(stack.double().numpy()))


def test_what_is_quantised_already_is_named_and_the_rest_audited(tmp_path: Path):
    weights = gaussian(2, 2)
    for expert in range(2):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.ones(2, 2)
    done = audit(save(weights, tmp_path))
    assert [(one.index, one.name) for one in done.matrices][-1] == (1, "gate_proj")
    assert {reason: len(names) for reason, names in done.skipped.items()} == {"FP8": 2}


# -- planted outliers


def found(done: Audit, **options) -> list[tuple[str, int, str, tuple[int, ...], str]]:
    return [
        (one.kind, one.index, one.matrix, one.experts, one.cure)
        for one in verdicts(done, **options)
    ]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), sigma=st.integers(-10, 2), wide=st.booleans())
def test_no_alarm_on_gaussian_weights(tmp_path_factory, seed: int, sigma: int, wide: bool):
    shape = (256, 640) if wide else (24, 40)
    weights = gaussian(8, 1, shape, seed=seed, sigma=2.0**sigma)
    assert found(audit(save(weights, tmp_path_factory.mktemp("calm")))) == []


def test_no_alarm_where_experts_differ_by_a_factor_of_two(tmp_path: Path):
    weights = gaussian(8, 1)
    for name, tensor in weights.items():
        tensor *= 1.0 if "experts.3." in name else 0.5
    assert found(audit(save(weights, tmp_path))) == []


def test_a_planted_outlier_expert_is_found_and_the_scale_that_cures_it(tmp_path: Path):
    weights = gaussian(8)
    weights["model.layers.1.mlp.experts.5.up_proj.weight"] *= 64
    done = audit(save(weights, tmp_path))
    assert found(done) == [("outlier", 1, "up_proj", (5,), "fp8-expert")]
    (one,) = verdicts(done)
    assert one.ratio == pytest.approx(64, rel=0.3)
    assert "saturates" in one.evidence
    assert found(done, max_ratio=100) == []


def test_an_outlier_that_harms_the_others_is_named_with_them(tmp_path: Path):
    weights = gaussian(8, 1)
    weights["model.layers.0.mlp.experts.5.up_proj.weight"] *= 1e5
    outlier, vanishing = verdicts(audit(save(weights, tmp_path)))
    assert (outlier.kind, outlier.experts) == ("outlier", (5,))
    assert "harms 7 of 8" in outlier.evidence
    assert (vanishing.kind, sorted(vanishing.experts)) == ("vanishing", [0, 1, 2, 3, 4, 6, 7])
    assert outlier.cure == vanishing.cure == "fp8-expert"


def test_an_outlier_channel_needs_a_scale_for_each_channel(tmp_path: Path):
    weights = gaussian(8, 1)
    weights["model.layers.0.mlp.experts.5.up_proj.weight"][9] *= 2.0**16
    kinds = found(audit(save(weights, tmp_path)))
    assert kinds[0] == ("outlier", 0, "up_proj", (5,), "fp8-channel")


def test_an_outlier_column_needs_blocks(tmp_path: Path):
    weights = gaussian(8, 1, (128, 1024))
    weights["model.layers.0.mlp.experts.5.up_proj.weight"][:, 9] *= 2.0**16
    kinds = found(audit(save(weights, tmp_path)))
    # In the block of that column all is lost still, an eighth of the matrix.
    assert kinds[0] == ("outlier", 0, "up_proj", (5,), "")


def test_an_expert_that_is_switched_off(tmp_path: Path):
    weights = gaussian(8, 1)
    weights["model.layers.0.mlp.experts.2.up_proj.weight"] *= 1e-20
    assert found(audit(save(weights, tmp_path))) == [("near-zero", 0, "up_proj", (2,), "")]


def test_not_finite_is_a_finding(tmp_path: Path):
    weights = gaussian(4, 1)
    weights["model.layers.0.mlp.experts.2.up_proj.weight"][3, 3] = float("inf")
    assert found(audit(save(weights, tmp_path))) == [("not-finite", 0, "up_proj", (2,), "")]


def test_groups_are_those_of_the_formats():
    assert {FORMATS[name].group for name in ("int8", "int4")} == {GROUP}
    assert FORMATS["fp8"].group == GROUP**2
    assert set(SCHEME_OF) < set(FORMATS)
