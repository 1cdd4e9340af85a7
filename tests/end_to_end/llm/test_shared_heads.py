"""Heads of keys that several devices have: how queries are shared out, and that a decoder then computes the same."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.llm.sharding import rules
from manygrad.llm.shared_heads import SharedHeads, share_heads, shares
from manygrad.nn.quantized.blocks import NAMED
from manygrad.nn.quantized.encode import encode
from tests.end_to_end.llm.test_variants import decoder, logits

FEW_KEYS = {"num_attention_heads": 14, "num_key_value_heads": 2}  # as Qwen2.5-0.5B


def devices(count: int) -> tuple[str, ...]:
    return tuple(f"CPU:{i}" for i in range(count))


def test_each_query_is_somewhere_and_no_device_has_as_many_as_with_whole_heads() -> None:
    for keys in range(1, 9):
        for group in (1, 2, 3, 4, 7):
            for count in range(1, 17):
                found, most = shares(keys * group, keys, count), -(-keys // count)
                whole = most * group  # queries of the device with the most, where no head of keys is shared
                if found is None:
                    continue
                assert [q for part in found for q in part] == list(range(keys * group))
                assert len(found) == count and max(map(len, found)) < whole
                for part in filter(len, found):
                    assert part[-1] // group - part[0] // group < most  # heads of keys
    assert shares(9, 3, 2) == [range(5), range(5, 9)]
    assert shares(14, 2, 4) == [range(4), range(4, 7), range(7, 11), range(11, 14)]
    assert shares(64, 8, 16) == [range(i, i + 4) for i in range(0, 64, 4)]
    assert shares(9, 3, 1) is shares(8, 4, 2) is None


@pytest.mark.parametrize("variant", ["qwen2", "gemma3"])
@pytest.mark.parametrize("count", [3, 4, 5])
def test_more_devices_than_heads_of_keys(variant: str, count: int) -> None:
    """With biases, and with norms of queries and windows; prompts in blocks, tokens one by one."""
    one, many = decoder(variant, **FEW_KEYS), decoder(variant, devices=devices(count), **FEW_KEYS)
    attention = many.layers[0].self_attn
    assert isinstance(attention.heads, SharedHeads) == (count > 3)
    if count > 3:
        assert attention.q_proj.weight.shape[0] == 4 * count * one.config.head_dim  # not 7 on two devices
        assert attention.cache.values.shape[2] == count
    for sizes in ([16, 1, 1, 8, 13, 1], [1] * 12):
        np.testing.assert_allclose(logits(many, sizes), logits(one, sizes), atol=1e-4)


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_quantised_heads(activations: str) -> None:
    """Rows of queries and columns of outputs in blocks, three heads of keys on two devices."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 9, "head_dim": 32}
    found = []
    for count in (1, 2):
        model = decoder("llama", **sizes)
        for layer in model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                linear = getattr(layer.self_attn, name)
                linear.weight = nn.QuantizedWeight(encode(linear.weight, "q4_1"), "q4_1", activations)
        share_heads(model, count)
        model.reserve(1, 64)
        if count > 1:
            nn.shard_rules(model, rules(model, devices(count)), devices(count))
            assert model.layers[0].self_attn.o_proj.weight.blocks.shape == (64, 10, 20)  # five heads on each
        Tensor.realize(*model.parameters(), *model.buffers())
        found.append(logits(model, [16, 1, 1, 8, 13, 1]))
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)


def test_blocks_of_two_heads_are_not_torn_apart() -> None:
    """A block of 32 has four heads of 8: they stay where whole heads of keys would be."""
    model = decoder("llama", hidden_size=64, num_attention_heads=12, num_key_value_heads=3)
    for layer in model.layers:
        linear = layer.self_attn.o_proj
        linear.weight = nn.QuantizedWeight(encode(linear.weight, "q8_0"), "q8_0")
    share_heads(model, 2)
    assert not isinstance(model.layers[0].self_attn.heads, SharedHeads)


@pytest.mark.parametrize("kind", NAMED)
def test_a_block_of_zeros_is_zeros(kind: str) -> None:
    """With which heads are filled up."""
    weight = nn.QuantizedWeight(Tensor.zeros(2, 3, NAMED[kind].nbytes, dtype="uint8"), kind)
    np.testing.assert_array_equal(weight.dequantize().numpy(), 0)
