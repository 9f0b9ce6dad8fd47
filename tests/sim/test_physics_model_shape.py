"""Model shapes: published counts, exactly; what a config must say and what it may."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput, UnknownModel
from moonpool.sim.physics.model_shape import _PRESETS, PRESET_NAMES, preset, shape_from_config, windowed_pairs

GEMMA2_9B = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 14336,
    "vocab_size": 256000,
    "sliding_window": 4096,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": None,
}


@pytest.mark.parametrize(
    ("name", "num_params", "kv_nbytes_per_token"),
    [
        ("llama3-8b", 8_030_261_248, 131_072),
        ("llama3-70b", 70_553_706_496, 327_680),
        ("llama2-70b", 68_976_648_192, 327_680),
        ("qwen2.5-72b", 72_706_203_648, 327_680),
        ("qwen3-8b", 8_190_735_360, 147_456),
        ("mistral-7b", 7_248_023_552, 131_072),
        ("deepseek-v3", 671_026_419_200, 70_272),
        ("smollm2-135m", 134_515_008, 23_040),
    ],
)
def test_presets_have_the_published_sizes(name: str, num_params: int, kv_nbytes_per_token: int) -> None:
    shape = preset(name)
    assert (shape.num_params, shape.kv_nbytes_per_token) == (num_params, kv_nbytes_per_token)


def test_every_preset_is_named_and_checked() -> None:
    assert len(PRESET_NAMES) == 8
    with pytest.raises(UnknownModel, match="llama3-70b"):
        preset("llama9")


@pytest.mark.parametrize(
    ("config", "num_params"),
    [(GEMMA2_9B, 9_241_705_984), (MIXTRAL_8X7B, 46_702_792_704), (QWEN3_30B_A3B, 30_532_122_624)],
)
def test_other_families_from_their_configs(config: dict[str, Any], num_params: int) -> None:
    assert shape_from_config(config).num_params == num_params


def test_active_parameters_of_mixtures() -> None:
    assert preset("deepseek-v3").num_active_params == pytest.approx(37e9, rel=0.02)  # published: 37B
    assert shape_from_config(MIXTRAL_8X7B).num_active_params == pytest.approx(12.9e9, rel=0.02)  # published: 12.9B
    assert shape_from_config(QWEN3_30B_A3B).num_active_params == pytest.approx(3.3e9, rel=0.1)  # published: 3.3B
    dense = preset("llama3-8b")
    assert (dense.num_routed_params, dense.num_active_params) == (0, dense.num_params - 128256 * 4096 - 4096)


def test_quantised_weights_leave_the_kv_as_it_is() -> None:
    shape = preset("deepseek-v3")
    assert (shape.weight_nbytes, shape.dtype_nbytes) == (1, 2)
    assert shape.weights_nbytes == shape.num_params


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"])
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    config = {name: value for name, value in MIXTRAL_8X7B.items() if name != field}
    with pytest.raises(InvalidInput, match=field):
        shape_from_config(config)


MLA_FIELDS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


@pytest.mark.parametrize("kept", [(), MLA_FIELDS[:1], MLA_FIELDS[1:], MLA_FIELDS[:3]])
def test_a_config_that_lacks_fields_of_mla_is_refused_with_all_of_their_names(kept: tuple[str, ...]) -> None:
    whole = dict(_PRESETS["deepseek-v3"])
    lacking = {field: value for field, value in whole.items() if field not in MLA_FIELDS or field in kept}
    missing = ", ".join(field for field in MLA_FIELDS if field not in kept)
    with pytest.raises(InvalidInput, match=f"has no {missing}: deepseek_v3 has multi-head latent attention"):
        shape_from_config(lacking)


def test_a_mixture_without_its_experts_is_refused() -> None:
    lacking = {field: value for field, value in MIXTRAL_8X7B.items() if field != "num_local_experts"}
    with pytest.raises(InvalidInput, match="has no num_local_experts: mixtral is a mixture of experts"):
        shape_from_config(lacking)


@pytest.mark.parametrize("field", ["num_attention_heads", "hidden_size", "num_hidden_layers"])
def test_sizes_of_nothing_are_refused(field: str) -> None:
    with pytest.raises(InvalidInput, match=f"{field} in the model's config is 0"):
        shape_from_config({**GEMMA2_9B, field: 0})


def test_a_missing_field_of_mla_or_of_a_mixture_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="qk_rope_head_dim"):
        shape_from_config({**MIXTRAL_8X7B, "kv_lora_rank": 512})
    with pytest.raises(InvalidInput, match="num_experts_per_tok"):
        shape_from_config({name: value for name, value in MIXTRAL_8X7B.items() if name != "num_experts_per_tok"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "big"),
        ("hidden_size", True),
        ("vocab_size", -1),
        ("torch_dtype", "int3"),
        ("num_experts_per_tok", 9),
        ("num_key_value_heads", 5),
        ("layer_types", ["linear_attention"] * 32),
    ],
)
def test_nonsense_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInput):
        shape_from_config({**MIXTRAL_8X7B, field: value})


def test_unknown_fields_and_families_are_no_trouble() -> None:
    config = {**MIXTRAL_8X7B, "model_type": "never-heard-of", "rope_theta": 1e6, "auto_map": {"a": "b"}}
    assert shape_from_config(config).num_params == shape_from_config(MIXTRAL_8X7B).num_params
    assert shape_from_config({"model_type": "outer", "text_config": GEMMA2_9B}) == shape_from_config(GEMMA2_9B)


def test_windows_by_rule_by_list_and_off() -> None:
    assert shape_from_config(GEMMA2_9B).num_window_layers == 21
    assert shape_from_config({**GEMMA2_9B, "model_type": "gemma3_text"}).num_window_layers == 35
    listed = ["sliding_attention"] * 40 + ["full_attention"] * 2
    assert shape_from_config({**GEMMA2_9B, "layer_types": listed}).num_window_layers == 40
    assert shape_from_config({**MIXTRAL_8X7B, "sliding_window": 4096}).num_window_layers == 32
    qwen = {**QWEN3_30B_A3B, "sliding_window": 4096, "max_window_layers": 28}
    assert shape_from_config(qwen).window is None
    assert shape_from_config({**qwen, "use_sliding_window": True}).num_window_layers == 20


def test_a_window_does_not_bound_what_the_pool_stores() -> None:
    assert shape_from_config(GEMMA2_9B).kv_nbytes_per_token == 42 * 2 * 8 * 256 * 2


@given(st.integers(0, 300), st.integers(1, 64))
def test_windowed_pairs_are_what_one_counts(num_tokens: int, window: int) -> None:
    assert windowed_pairs(num_tokens, window) == sum(min(token + 1, window) for token in range(num_tokens))
