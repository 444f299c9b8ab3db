"""requests.csv against a loop over every token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import routeprof
from routeprof.errors import LevelRequiredError
from routeprof.profile import Profile
from routeprof.report.csv import available, csv_text
from tests.commands.conftest import MIXTRAL

PROMPT, NEW = (10, 6), 5


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**MIXTRAL)).eval()


@pytest.fixture(scope="module")
def profile(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Two batches of two requests, the second request of each padded."""
    directory = tmp_path_factory.mktemp("runs") / "tokens"
    mask = torch.ones(2, PROMPT[0], dtype=torch.long)
    mask[1, : PROMPT[0] - PROMPT[1]] = 0
    with routeprof.record(model, directory, level="tokens"):
        for _ in range(2):
            ids = torch.randint(1, 64, (2, PROMPT[0]))
            model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
    return routeprof.load(directory)


def test_tokens_by_phase_in_the_order_of_arrival(profile: Profile):
    table = profile.requests()
    assert table["request"].tolist() == ["0", "1", "2", "3"]
    assert table["prefill_tokens"].tolist() == [*PROMPT, *PROMPT]
    assert table["decode_tokens"].tolist() == [NEW - 1] * 4
    assert table["other_tokens"].tolist() == [0] * 4
    assert table["tokens"].tolist() == [PROMPT[0] + NEW - 1, PROMPT[1] + NEW - 1] * 2


def test_divergence_and_top_experts(profile: Profile):
    table = profile.requests()
    counts: dict[tuple[int, int], Counter[int]] = {}
    for layer in profile.layer_indices:
        tokens = profile.tokens(layer)
        for request, ids in zip(tokens.request, tokens.ids, strict=True):
            counts.setdefault((int(request), layer), Counter()).update(ids.tolist())
    for request in range(4):
        divergences, shares = [], {}
        for layer in profile.layer_indices:
            own = counts[request, layer]
            everyone = sum((counts[other, layer] for other in range(4)), Counter())
            divergences.append(divergence(own, everyone))
            shares |= {(layer, e): own[e] / own.total() for e in range(8)}
        assert table["divergence_from_all"][request] == pytest.approx(np.mean(divergences))
        best = sorted(shares, key=lambda cell: (-shares[cell], cell))[:3]
        assert table["top_experts"][request] == " ".join(f"{layer}:{e}" for layer, e in best)


def divergence(one: Counter[int], other: Counter[int]) -> float:
    """Jensen–Shannon divergence of two counts over 8 experts, in bits."""
    p = np.array([one[e] for e in range(8)]) / one.total()
    q = np.array([other[e] for e in range(8)]) / other.total()
    middle = (p + q) / 2
    terms = [
        0.5 * part[e] * np.log2(part[e] / middle[e])
        for part in (p, q)
        for e in range(8)
        if part[e] > 0
    ]
    return float(sum(terms))


def test_it_is_a_report_of_level_tokens_only(profile: Profile, model: nn.Module, tmp_path: Path):
    assert "requests" in available(profile)
    assert csv_text(profile, "requests").splitlines()[0] == (
        "request,tokens,prefill_tokens,decode_tokens,other_tokens,divergence_from_all,top_experts"
    )
    with routeprof.record(model, tmp_path / "steps", level="steps"):
        model(torch.randint(1, 64, (1, 4)))
    steps = routeprof.load(tmp_path / "steps")
    assert "requests" not in available(steps)
    with pytest.raises(LevelRequiredError, match="level tokens"):
        steps.requests()


def test_a_recording_without_passes_has_no_requests(model: nn.Module, tmp_path: Path):
    with routeprof.record(model, tmp_path / "empty", level="tokens"):
        pass
    assert len(routeprof.load(tmp_path / "empty").requests()) == 0
