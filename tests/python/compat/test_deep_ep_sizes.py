"""How many tokens a buffer of deep_ep is made for, by its bytes."""
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

import crossdock
from crossdock import ep
from crossdock.compat import deep_ep
from crossdock.compat.deep_ep.few import FewWorld, options_of
from crossdock.compat.deep_ep.settings import Settings
from crossdock.compat.deep_ep.world import TOKENS_OF_AN_SM, Shape


def shape(hidden, top_k=8):
    return Shape(experts=256, top_k=top_k, hidden=hidden, wide_ids=True)


def options(tokens, sms):
    return ep.Options(experts=8, top_k=1, max_tokens=tokens, hidden=8, slots=1, fall_back=False, cast=False,
                      dispatch_sms=sms)


def test_an_sm_has_room_for_so_many_tokens():
    ep.Group(options(TOKENS_OF_AN_SM, 1), world=1, backend="twin").close()
    with pytest.raises(crossdock.InvalidArgument, match="dispatch_sms = 1 must be 2 to"):
        ep.Group(options(TOKENS_OF_AN_SM + 1, 1), world=1, backend="twin")


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("hidden", [8, 512, 1024, 2048, 7168])
@pytest.mark.parametrize("num_sms", [0, 2, 24])
def test_bytes_are_for_no_more_tokens_than_the_sms(world, hidden, num_sms):
    settings = Settings(num_sms=num_sms)
    for room in (int(2e9), 1 << 38):
        tokens = settings.least_tokens(shape(hidden), world, room)
        assert 0 < tokens <= TOKENS_OF_AN_SM * settings.sms(world)[0]
        assert world * -(-tokens // 32) * 32 * 8 <= 1 << 30
    small = settings.least_tokens(shape(hidden), world, 1 << 20)
    assert small < tokens, "few bytes are still for few tokens"


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("regions", [2, 3, 5])
@pytest.mark.parametrize("hidden, row, promised", [
    (7168, 7168, 4096), (7168, 14336, 8192), (2048, 2048, 4096), (300, 600, 8192)])
def test_a_hint_is_for_the_tokens_that_it_promises(monkeypatch, world, regions, hidden, row, promised):
    """Of rows in FP8 and in bf16: no call before the largest one says how large that will be."""
    monkeypatch.setenv("CROSSDOCK_DEEP_EP_REGIONS", str(regions))
    room = deep_ep.Config().get_nvl_buffer_size_hint(row, world)
    tokens = Settings.read().least_tokens(shape(hidden - hidden % 8), world, room)
    assert promised <= tokens < 1.2 * promised


def test_more_tokens_than_the_sms_of_a_call_have_room_for_take_more_of_them():
    def one(group):
        buffer = deep_ep.Buffer(group)
        deep_ep.Buffer.set_num_sms(2)
        n = 2 * TOKENS_OF_AN_SM + 1
        ids = np.zeros((n, 1), np.int64)
        layout = buffer.get_dispatch_layout(ids, 8)
        out = buffer.dispatch(np.zeros((n, 8), np.uint16), num_tokens_per_rank=layout[0],
                              is_token_in_rank=layout[3], num_tokens_per_expert=layout[2], topk_idx=ids,
                              topk_weights=np.ones((n, 1), np.float32))
        assert len(out[0]) == n
        buffer.destroy()

    before = deep_ep.Buffer.num_sms
    try:
        deep_ep.Threads(1, backend="twin").run(one)
    finally:
        deep_ep.Buffer.num_sms = before


@pytest.mark.parametrize("cast, most", [(True, 40e6), (False, 48e6)])
def test_low_latency_buffers_for_128_tokens_take_few_bytes(cast, most):
    of = Shape(experts=256, top_k=8, hidden=7168, wide_ids=True, cast=cast)
    rows = options_of(of, 4, 128, 1.0, True)
    assert rows.compressed
    total = sum(ep.sizes(options, 4).window_bytes + ep.sizes(options, 4).local_bytes
                for options in (rows, FewWorld.weight_options(rows, of)))
    assert 0.9 * most < total <= most, f"{total / 1e6:.1f} MB"


@pytest.mark.parametrize("world, top_k, hidden, compressed", [
    (8, 8, 7168, True), (8, 8, 7176, False), (32, 21, 7168, True), (32, 22, 7168, False), (16, 32, 512, True)])
def test_any_number_of_choices_has_buffers(world, top_k, hidden, compressed):
    made = options_of(shape(hidden, top_k), world, 64, 1.0, False)
    assert made.compressed == compressed
    assert ep.sizes(made, world).window_bytes > 0
