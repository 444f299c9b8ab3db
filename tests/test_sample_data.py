"""The sample model teaches what it is there for: narrow traffic skews it, mixed does not."""

from __future__ import annotations

import numpy as np
import pytest

import routeprof
from routeprof.profile import Profile
from routeprof.sample_data import (
    MODEL_DIR,
    PROMPT_KINDS,
    RECORDINGS_DIR,
    decode,
    encode,
    load_model,
    load_prompts,
)
from routeprof.sample_data.record import PROMPTS, record_prompts


def imbalance(profile: Profile, tag: str) -> np.ndarray:
    """Max ÷ mean load of each layer, from the counts alone."""
    counts = profile.select(tag=tag).counts
    return counts.max(1) / counts.mean(1)


def test_the_model_is_small():
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 6e6


@pytest.mark.parametrize("kind", PROMPT_KINDS)
def test_prompts_survive_the_encoding(kind: str):
    prompts = load_prompts(kind)
    assert len(prompts) == PROMPTS
    batch = encode(prompts)
    assert [decode(row) for row in batch["input_ids"]] == prompts
    assert batch["attention_mask"].sum().item() == sum(len(text.encode()) for text in prompts)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    directory = tmp_path_factory.mktemp("sample") / "recording"
    record_prompts(load_model(), directory, new_tokens=8)
    return routeprof.load(directory)


def test_every_real_token_is_counted(live: Profile):
    kinds = [*PROMPT_KINDS, "mixed"]
    prompts = [text for kind in kinds for text in load_prompts(kind)[:PROMPTS]]
    # The eighth new token is never fed back.
    expected = sum(len(text.encode()) for text in prompts) + len(prompts) * 7
    table = live.layers()
    assert table["tokens"].tolist() == [expected] * 4
    assert table["assignments"].tolist() == [expected * 2] * 4
    assert table["coverage"].tolist() == [1.0] * 4


def test_narrow_prompts_skew_the_healthy_model_and_mixed_ones_do_not(live: Profile):
    for profile in (live, routeprof.load(RECORDINGS_DIR / "healthy")):
        mixed = imbalance(profile, "mixed")
        assert mixed.max() < 1.6
        for kind in PROMPT_KINDS:
            assert imbalance(profile, kind).max() > 2.0
            assert np.median(imbalance(profile, kind)) > np.median(mixed)


def test_the_collapsed_model_is_skewed_whatever_the_prompt():
    profile = routeprof.load(RECORDINGS_DIR / "collapsed")
    for kind in (*PROMPT_KINDS, "mixed"):
        assert np.median(imbalance(profile, kind)) > 3.0


@pytest.mark.parametrize("name", ["healthy", "collapsed"])
def test_shipped_recordings_are_whole(name: str):
    profile = routeprof.load(RECORDINGS_DIR / name)
    assert profile.coverage == 1.0
    assert not [finding for finding in profile.findings() if finding.severity == "error" and
                finding.code != "collapse"]  # fmt: skip
