"""The exceptions: one class a code, the fields of Error, and what a mistake is told."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import pickle

import numpy as np
import pytest

import crossdock
from cases import TIMEOUT, Case, raises, tokens_of
from crossdock import ep, moe


def test_every_code_has_a_class_with_its_fields():
    classes = crossdock.Error.__subclasses__()
    assert {kind.of_code for kind in classes} == set(crossdock.Code) - {crossdock.Code.OK}
    assert issubclass(crossdock.InvalidArgument, ValueError)
    assert issubclass(crossdock.DeadlineExceeded, TimeoutError)
    with pytest.raises(crossdock.InvalidArgument) as caught:
        ep.sizes(ep.Options(experts=8, top_k=2, max_tokens=16, hidden=7000), world=4)
    error = caught.value
    assert error.code == crossdock.Code.INVALID_ARGUMENT
    assert error.scope == crossdock.Scope.CALL and error.retry == crossdock.Retry.NO
    assert error.native is None
    assert error.where.file == "window.cpp" and error.where.line > 0
    assert "hidden = 7000 must be a multiple of 128" in error.message and "7040" in error.message
    assert str(error).startswith("invalid argument") and "window.cpp" in str(error)


def test_errors_can_be_sent_between_processes():
    with pytest.raises(crossdock.InvalidArgument) as caught:
        ep.sizes(ep.Options(experts=0, top_k=2, max_tokens=16, hidden=128), world=4)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is crossdock.InvalidArgument and str(copy) == str(caught.value)
    assert vars(copy) == vars(caught.value)


def test_the_code_underneath_is_kept():
    with pytest.raises(crossdock.Error) as caught:
        crossdock.store_exchange("file:///proc/no/such/folder", "g", 0, 2, timeout=1).all_gather(b"", 1)
    assert caught.value.native is not None and caught.value.native.domain == "errno"
    assert caught.value.native.value > 0


@pytest.mark.parametrize("field, value, text", [
    ("experts", 0, "experts = 0"), ("top_k", 33, "top_k = 33 must be 1 to 32"),
    ("experts", -1, "experts = -1 must be a whole number"),
    ("experts", 2.5, "experts = 2.5 must be a whole number"),
    ("experts", True, "experts = True must be a whole number"),
    ("hidden", 12, "pad the rows to 16"), ("slots", 0, "slots = 0"),
    ("dispatch_sms", [1, 2], "has 2 numbers for 4 ranks"), ("wait", -1.0, "wait = -1"),
    ("wait", float("nan"), "wait = nan")])
def test_wrong_options(field, value, text):
    good = dict(experts=8, top_k=2, max_tokens=16, hidden=256, cast=False)
    assert ep.sizes(ep.Options(**good), 4).capacity == 64
    with raises(crossdock.InvalidArgument, text):
        ep.sizes(ep.Options(**{**good, field: value}), 4)


@pytest.mark.parametrize("make", [
    lambda more: ep.sizes(ep.Options(**{**dict(experts=8, top_k=2, max_tokens=16, hidden=256), **more}), 4),
    lambda more: moe.Layer(moe.Options(**{**dict(experts=8, top_k=2, max_tokens=16, hidden=256, inter=128),
                                          **more}), world=1, backend="twin")])
@pytest.mark.parametrize("wrong", [object(), 1 + 2j, {}])
def test_values_of_another_type_are_named(make, wrong):
    fields = dataclasses.fields(ep.Options if "sizes" in make.__code__.co_names else moe.Options)
    assert len(fields) > 10
    for field in fields:
        with raises(crossdock.InvalidArgument, field.name):
            make({field.name: wrong})


def test_flags_and_numbers_of_numpy_are_taken():
    good = dict(experts=np.int64(8), top_k=2, max_tokens=np.uint32(16), hidden=256, cast=np.bool_(False),
                dispatch_sms=np.int64(8), combine_sms=np.array([8, 8]), wait=np.float32(2.0))
    assert ep.sizes(ep.Options(**good), 2).capacity == 32
    for field, value, text in [("cast", 1, "cast = 1 must be True or False"),
                               ("masks", "yes", "masks = 'yes' must be True or False"),
                               ("wait", "2", "wait = '2' must be a number of seconds"),
                               ("dispatch_sms", "ab", "dispatch_sms = 'a' must be a whole number")]:
        with raises(crossdock.InvalidArgument, text):
            ep.sizes(ep.Options(**{**good, field: value}), 2)


def test_wrong_groups():
    options = Case().options()
    with raises(crossdock.InvalidArgument, "backend = 'cuda' must be 'gpu' or 'twin'"):
        ep.Group(options, world=2, backend="cuda")
    with raises(crossdock.InvalidArgument, "world is missing"):
        ep.Group(options, backend="twin")
    with raises(crossdock.InvalidArgument, "world = 33 must be 1 to 32"):
        ep.Group(options, world=33, backend="twin")
    with raises(crossdock.InvalidArgument, "timeout = -1"):
        ep.Group(options, world=2, backend="twin", timeout=-1)


@pytest.fixture(name="group", scope="module")
def shared_group():
    with Case(alignment=8).group() as group:
        yield group


def good_tokens():
    of = tokens_of(Case(), 0, 1)
    return {"rows": of.rows, "ids": of.ids, "weights": of.weights}


@pytest.mark.parametrize("change, texts", [
    (lambda a: {"rows": a["rows"].astype(np.float64)[:, :7]}, ["rows", "16"]),
    (lambda a: {"rows": a["rows"][0]}, ["rows is uint16 [128]", "two dimensions"]),
    (lambda a: {"rows": np.zeros((2, 3, 4), np.uint16)}, ["two dimensions, not 3"]),
    (lambda a: {"rows": a["rows"].T.copy().T}, ["rows", "must be contiguous"]),
    (lambda a: {"rows": a["rows"][::-1]}, ["rows", "run backwards"]),
    (lambda a: {"rows": np.broadcast_to(a["rows"][:1], a["rows"].shape)}, ["neither overlap"]),
    (lambda a: {"rows": np.zeros((24, 130), np.uint16)[:, :128]}, ["multiples of 16"]),
    (lambda a: {"rows": np.zeros((24, 512), np.uint16)}, ["do not fit the slots"]),
    (lambda a: {"rows": [[1, 2]]}, ["rows must be a torch tensor, a NumPy array", "not list"]),
    (lambda a: {"ids": a["ids"].astype(np.int64)}, ["ids is int64", "wide_ids = False", "int32"]),
    (lambda a: {"ids": a["ids"][:, :2].copy()}, ["ids is int32 [24, 2]", "[24, 3]"]),
    (lambda a: {"ids": a["ids"][1:].copy()}, ["ids is int32 [23, 3]", "[24, 3]"]),
    (lambda a: {"ids": np.asfortranarray(a["ids"])}, ["ids", "dense"]),
    (lambda a: {"weights": a["weights"].astype(np.float64)}, ["weights is float64", "float32"]),
    (lambda a: {"weights": a["weights"][:, ::-1]}, ["weights", "dense"]),
    (lambda a: {"cast": True, "rows": a["rows"].view(np.float16)}, ["a cast takes bfloat16"]),
    (lambda a: {"cast": True}, ["cast = true"]),
    (lambda a: {"cast": "e4m3"}, ["cast = 'e4m3' must be True, False or \"ue8m0\""]),
    (lambda a: {"cast": 1}, ["cast = 1 must be True, False or"]),
    (lambda a: {"scales": np.zeros((3, 1), np.float32)}, ["a row for each of the 24 tokens"]),
    (lambda a: {"scales": np.zeros((24, 2), np.uint8)}, ["scale_bytes = 2", "multiple of 4"]),
    (lambda a: {"scales": np.zeros((24, 2), np.uint16), "scales_by_column": True},
     ["words of 4 bytes"]),
    (lambda a: {"rank": 5}, ["rank 5 is not one of the 2 ranks"]),
])
def test_wrong_tokens(group, change, texts):
    good = good_tokens()
    arguments = {"rank": 0, **good, **change(good)}
    with raises(crossdock.InvalidArgument, *texts):
        group.dispatch(**arguments)


def test_too_many_tokens_and_no_rank(group):
    good = good_tokens()
    twice = {key: np.concatenate([value, value]) for key, value in good.items()}
    with raises(crossdock.InvalidArgument, "48 tokens are more than the max_tokens = 24"):
        group.dispatch(rank=0, **twice)
    with raises(crossdock.InvalidArgument, "rank is missing", "[0, 1]"):
        group.dispatch(**good)
    with pytest.raises(TypeError):
        group.dispatch(rank=-1, **good)


def test_a_refused_dispatch_takes_no_slot():
    case = Case(world=1)
    of = tokens_of(case, 0, 1)
    with case.group() as group:
        for _ in range(case.slots + 1):
            with raises(crossdock.InvalidArgument):
                group.dispatch(of.rows[:, :3], of.ids)
        handles = [group.dispatch(of.rows, of.ids) for _ in range(case.slots)]
        group.synchronize(TIMEOUT)
        assert handles[0].rows() == handles[1].rows() > 0


def test_wrong_outputs():
    case = Case(world=1, alignment=8)
    of = tokens_of(case, 0, 1)
    good = np.zeros((24, case.hidden), np.uint16)
    with case.group() as group, case.group() as other:
        handle = group.dispatch(of.rows, of.ids)
        for wrong, text in [(good[:23], "it must be [24, 128]"), (good.astype(np.float32), "bfloat16"),
                            (good.T.copy().T, "contiguous"), (np.zeros((24, 130), np.uint16)[:, 2:],
                                                              "multiples of 16")]:
            with raises(crossdock.InvalidArgument, "out", text):
                group.combine(handle, out=wrong)
            with raises(crossdock.InvalidArgument, "bias", text):
                group.combine(handle, bias=[wrong])
        with raises(crossdock.InvalidArgument, "3 biases"):
            group.combine(handle, bias=[good] * 3)
        with raises(crossdock.InvalidArgument, "weights", "float32"):
            group.combine(handle, weights=np.zeros((24, 3)))
        with raises(crossdock.InvalidArgument, "by_place", "[places, 128]"):
            group.reduce_rows(handle, good[:, :64])
        with raises(crossdock.InvalidArgument, "another group"):
            other.combine(handle)
        with raises(crossdock.InvalidArgument, "another group"):
            other.group_rows(handle)
    with Case(world=1).group() as group:
        handle = group.dispatch(of.rows, of.ids)
        with raises(crossdock.InvalidArgument, "expert_alignment = 0"):
            group.group_rows(handle)


def test_a_fault_is_raised_and_the_group_works_after_reset():
    case = Case()
    sent = [tokens_of(case, r, 1) for r in range(2)]
    good = sent[1].ids.copy()
    sent[1].ids[3, 1] = 4711
    with case.group() as group:
        for r, of in enumerate(sent):
            group.dispatch(of.rows, of.ids, rank=r).close()
        with pytest.raises(crossdock.Error) as caught:
            group.synchronize(TIMEOUT)
        assert "4711" in caught.value.message or "rank 1" in caught.value.message
        with pytest.raises(crossdock.Error):
            group.check()
        group.reset(TIMEOUT)
        group.check()
        sent[1].ids[:] = good
        handles = [group.dispatch(of.rows, of.ids, rank=r) for r, of in enumerate(sent)]
        group.synchronize(TIMEOUT)
        assert all(handle.rows() > 0 for handle in handles)


def test_waits_end_by_their_deadline():
    case = Case(world=2)
    of = tokens_of(case, 0, 1)
    with case.group() as group:
        handle = group.dispatch(of.rows, of.ids, rank=0)
        with raises(crossdock.DeadlineExceeded, "rows' number"):
            handle.rows(timeout=0.05)  # nothing has run yet
        with raises(crossdock.DeadlineExceeded):
            handle.expert_counts(timeout=0)
        with pytest.raises(crossdock.PeerLost) as caught:
            group.synchronize(TIMEOUT)  # rank 1 never came
        assert "rank 1" in caught.value.message
