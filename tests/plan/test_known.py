"""Known models: names as users write them, and sizes against figures that were published."""

from __future__ import annotations

import re
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

import pytest

from routeprof.errors import UsageError
from routeprof.plan.cache import cache_bytes
from routeprof.plan.config import STORED, read_config
from routeprof.plan.known import known_facts, known_name, known_names, nearest_names
from routeprof.plan.model import Model, load_model, model_of
from routeprof.plan.parameters import by_part, total
from routeprof.plan.precision import precision
from tests.plan.models import FAMILIES

# Embeddings that a maker counts as active: input and output, the output's only, or none.
BOTH, OUTPUT, NONE = 0, 1, 2


class Published(NamedTuple):
    """Billions of parameters, as the maker writes them."""

    total: str
    active: str
    embeddings: int = BOTH


DENSE = ""
PUBLISHED = {
    # github.com/foundation-model-stack/bamba, README.md: "9B (9.78B)".
    "bamba-9b": Published("9.78", DENSE),
    # github.com/deepseek-ai/DeepSeek-V2, README.md and arXiv:2405.04434, sections 3.1.2 and B.1.
    "deepseek-v2": Published("236", "21"),
    "deepseek-v2-lite": Published("15.7", "2.4", OUTPUT),
    # github.com/deepseek-ai/DeepSeek-V3, README.md; R1 and V3.1 are trained from it.
    "deepseek-v3": Published("671", "37"),
    "deepseek-r1": Published("671", "37"),
    "deepseek-v3.1": Published("671", "37"),
    # arXiv:2508.10925, table 1: "Unembedding parameters are counted towards active, but not
    # embedding".
    "gpt-oss-120b": Published("116.83", "5.13", OUTPUT),
    "gpt-oss-20b": Published("20.91", "3.61", OUTPUT),
    # Model card of Granite 4.0, see the source of the file.
    "granite-4.0-h-small": Published("32", "9"),
    "granite-4.0-h-tiny": Published("7", "1"),
    # arXiv:2403.19887 and arXiv:2408.12570, abstracts.
    "jamba-v0.1": Published("52", "12"),
    "jamba-1.5-mini": Published("52", "12"),
    "jamba-1.5-large": Published("398", "94"),
    # Model cards: "32 billion activated parameters and 1 trillion total parameters".
    "kimi-k2": Published("1.0e3", "32"),
    "kimi-k2.5": Published("1.0e3", "32"),
    # arXiv:2407.21783.
    "llama-3.1-405b": Published("405", DENSE),
    "llama-3.1-70b": Published("70", DENSE),
    "llama-3.1-8b": Published("8", DENSE),
    # huggingface.co/blog/llama4-release: 17B active of 400B; of Scout's 109B the language model is
    # 108B (huggingface.co/unsloth/Llama-4-Scout-17B-16E-Instruct-GGUF).
    "llama-4-maverick": Published("400", "17"),
    "llama-4-scout": Published("108", "17"),
    # github.com/MiniMax-AI/MiniMax-01 and MiniMax-M1, README.md.
    "minimax-text-01": Published("456", "45.9", NONE),
    "minimax-m1": Published("456", "45.9", NONE),
    # mistral.ai/news/mixtral-of-experts and mixtral-8x22b.
    "mixtral-8x7b": Published("46.7", "12.9"),
    "mixtral-8x22b": Published("141", "39"),
    # research.nvidia.com/labs/nemotron: Nano has "3.2B active (3.6B with embeddings), 31.6B total".
    "nemotron-3-nano-30b-a3b": Published("31.6", "3.6"),
    "nemotron-3-super-120b-a12b": Published("120", "12"),
    "nemotron-3-ultra-550b-a55b": Published("55e1", "55", OUTPUT),
    # arXiv:2504.03624, abstract.
    "nemotron-h-56b": Published("56", DENSE),
    # arXiv:2409.02060: 6.9 and 1.3 billion.
    "olmoe-1b-7b": Published("6.9", "1.3"),
    # qwenlm.github.io/blog/qwen-moe and /qwen2.
    "qwen1.5-moe-a2.7b": Published("14.3", "2.7"),
    "qwen2-57b-a14b": Published("57.41", "14"),
    # Model cards of Qwen3, Qwen3-Coder and Qwen3-Next.
    "qwen3-30b-a3b": Published("30.5", "3.3"),
    "qwen3-235b-a22b": Published("235", "22"),
    "qwen3-coder-480b-a35b": Published("480", "35"),
    "qwen3-next-80b-a3b": Published("80", "3"),
    # By their names; sizes of their files are below.
    "zamba2-1.2b": Published("1.2", DENSE),
    "zamba2-2.7b": Published("2.7", DENSE),
    "zamba2-7b": Published("7", DENSE),
}
# Billions without embeddings, where these are published, too.
BARE = {
    "qwen2-57b-a14b": "56.32",
    "qwen3-30b-a3b": "29.9",
    "qwen3-235b-a22b": "234",
    "qwen3-next-80b-a3b": "79",
}
# GB of the safetensors files in BF16, as huggingface.co lists them.
FILES = {
    # ibm-ai-platform/Bamba-9B-v1.
    "bamba-9b": (4.95, 4.89, 4.89, 4.83),
    # Zyphra/Zamba2-1.2B, at pull request 1; Zamba2-2.7B-instruct at 699f349; Zamba2-7B-Instruct.
    "zamba2-1.2b": (2.43,),
    "zamba2-2.7b": (4.94, 0.384),
    "zamba2-7b": (4.81, 4.97, 4.93),
}


def agrees(numbers: float, published: str) -> bool:
    """Whether rounding or cutting off gives the figure: makers do either."""
    exact, figure = Decimal(numbers) / 10**9, Decimal(published)
    return figure in (exact.quantize(figure, ROUND_HALF_UP), exact.quantize(figure, ROUND_DOWN))


def embeddings(model: Model) -> int:
    return model.vocab * model.hidden


@pytest.mark.parametrize("name", known_names())
def test_parameters_are_as_published(name: str) -> None:
    model, published = load_model(name), PUBLISHED[name]
    assert agrees(total(model.weights), published.total)
    assert model.active is not None
    if published.active:
        active = model.active - published.embeddings * embeddings(model)
        assert agrees(active, published.active)
    else:
        assert model.active == total(model.weights)
        assert not model.moes


@pytest.mark.parametrize("name", BARE)
def test_parameters_without_embeddings_are_as_published(name: str) -> None:
    model = load_model(name)
    assert agrees(total(model.weights) - 2 * embeddings(model), BARE[name])


@pytest.mark.parametrize("name", FILES)
def test_files_are_as_large_as_published(name: str) -> None:
    sizes = FILES[name]
    # Each is rounded to 10 MB.
    assert 2 * total(load_model(name).weights) / 1e9 == pytest.approx(
        sum(sizes), abs=0.005 * len(sizes)
    )


@pytest.mark.parametrize(
    ("name", "experts", "attention"),
    [("gpt-oss-120b", "114.71", "0.96"), ("gpt-oss-20b", "19.12", "0.64")],
)
def test_parts_of_gpt_oss_are_as_published(name: str, experts: str, attention: str) -> None:
    """Table 1 of arXiv:2508.10925; the MLP's part has the routers, too."""
    model = load_model(name)
    parts = by_part(model.weights)
    assert model.shape is not None
    norms = (2 * len(model.shape.layers) + 1) * model.hidden
    assert agrees(parts["routed_experts"] + parts["other"] - norms, experts)
    assert agrees(parts["attention"], attention)


def test_caches_are_as_published() -> None:
    """DeepSeek-V2 keeps 9 / 2 heads' width of 128 in 60 layers (arXiv:2405.04434, table 1)."""
    kept = load_model("deepseek-v2").kept
    assert kept is not None
    assert cache_bytes(kept, 1, precision("bf16")).kv == 2 * 9 / 2 * 128 * 60


@pytest.mark.parametrize("name", known_names())
def test_sources_can_be_looked_up(name: str) -> None:
    facts = known_facts(name)
    assert facts is not None
    assert set(facts) == {"name", "source", "config"}
    assert re.search(r"(github|huggingface)\.(com|co)/[\w.-]+/[\w.-]+", facts["source"])
    assert re.search(r"at commit [0-9a-f]{7,12}\b", facts["source"])
    assert re.fullmatch(r"[\w-]+/[\w.-]+", facts["name"])


def test_every_family_has_a_known_model() -> None:
    assert {load_model(name).family for name in known_names()} == set(FAMILIES)


# -- names


@pytest.mark.parametrize("name", known_names())
def test_short_and_full_names_are_understood(name: str) -> None:
    full = known_facts(name)
    assert full is not None
    owner, called = full["name"].split("/")
    spelled = (name, name.upper(), name.replace("-", "_"), name.replace("-", ""), called)
    for written in (*spelled, f"{owner}/{called}", f"{owner}/{called}/", f"{called}-Instruct"):
        assert known_name(written) == name


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-4-Scout-17B-16E", "llama-4-scout"),
        ("Zyphra/Zamba2-1.2B-instruct", "zamba2-1.2b"),
    ],
)
def test_models_that_were_tuned_are_understood(written: str, meant: str) -> None:
    assert known_name(written) == meant
    assert read_config(written)[1] == meant
    assert load_model(written).name == meant


@pytest.mark.parametrize(
    "written",
    [
        "",
        "instruct",
        "zamba2-12b",
        "qwen3-30b-a3b-instruct-2507",
        "qwen3-235b-a22b-fp8",
        "qwen3-coder-30b-a3b-instruct",
        "deepseek-v3.2",
        "llama-3-8b",
        "kimi-k2.6",
        "jamba-1.5",
    ],
)
def test_other_models_are_not_taken_for_known_ones(written: str) -> None:
    assert known_name(written) is None
    assert known_facts(written) is None


@pytest.mark.parametrize(
    ("written", "first"),
    [
        ("deepsek-v3", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek-v3.1"),
        ("mixtral-8x7", "mixtral-8x7b"),
        ("qwen/qwen3-235b-a22b-thinking-2507", "qwen3-235b-a22b"),
        ("ai21labs/AI21-Jamba-Large-1.5", "jamba-1.5-large"),
    ],
)
def test_the_nearest_names_are_told(written: str, first: str) -> None:
    assert first in nearest_names(written)
    with pytest.raises(UsageError, match=rf"no known model: pass .*{re.escape(first)}") as caught:
        read_config(written)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("written", ["x", "?", "no such model"])
def test_all_names_are_told_where_none_is_near(written: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_config(written)
    assert str(caught.value).endswith(", ".join(known_names()))


@pytest.mark.parametrize("written", ["models/deepseek-v3.json", "./deepseek", "/no/where", "~/m"])
def test_paths_that_are_not_there_get_no_names(written: str) -> None:
    with pytest.raises(UsageError, match="is no file and no directory") as caught:
        read_config(written)
    assert "deepseek-v2" not in str(caught.value)


# -- what else the files say


def test_minimax_files_are_read_as_transformers_calls_them() -> None:
    """Its own config.json lists layers as 0 and 1 and has a model type of its own."""
    own: dict[str, Any] = read_config("minimax-m1")[0]
    types = ["full_attention" if kind else "linear_attention" for kind in own["attn_type_list"]]
    renamed = own | {"model_type": "minimax", "layer_types": types}
    for family in ("minimax_m1", "minimax_text_01"):
        assert model_of(own | {"model_type": family}).weights == model_of(renamed).weights
    assert load_model("minimax-m1").weights == load_model("minimax-text-01").weights


def test_quantised_checkpoints_are_noted_wherever_the_config_says_so() -> None:
    assert STORED.format("compressed-tensors") in load_model("kimi-k2.5").notes
    assert STORED.format("mxfp4") in load_model("gpt-oss-20b").notes
