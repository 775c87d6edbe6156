"""What a caller can get wrong before any file is involved."""

import pytest
import torch
from nxd_ckpt import (
    Shard,
    ShardedTensor,
    async_save,
    delete,
    gc,
    list_checkpoints,
    load,
    open_checkpoint,
    pin,
    retain,
    save,
)
from nxd_ckpt.testing import outcomes_on_threads

BAD_TAGS = ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a\nb", "a\0b", "\ud800", "x" * 201, "é" * 101, "LATEST"]


@pytest.mark.parametrize("tag", [*BAD_TAGS, 7])
def test_bad_tag_is_refused_everywhere(tmp_path, tag):
    with pytest.raises(ValueError, match="is not allowed: a tag is the name of a folder"):
        save(tmp_path, tag, {})
    with pytest.raises(ValueError, match="is not allowed: a tag is the name of a folder"):
        load(tmp_path, tag, into={})
    with pytest.raises(ValueError, match="is not allowed: a tag is the name of a folder"):
        open_checkpoint(tmp_path, tag)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"a": {1: 2}}, r"objects\['a'\] has the key 1; JSON keys are strings, so use '1'"),
        ([0, {"x": torch.ones(1)}], r"objects\[1\]\['x'\] is a Tensor, which JSON cannot hold"),
        ({1, 2}, "objects is a set, which JSON cannot hold"),
        (["\ud83d"], r"objects\[0\] is '\\ud83d', which is not valid Unicode"),
        ({"\ud83d": 1}, "a key of objects is .*, which is not valid Unicode"),
        ([10**5000], r"objects\[0\] is a number of 16610 bits; pass a number this large as a string"),
    ],
)
def test_save_objects_that_json_cannot_hold_names_the_place(tmp_path, objects, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, "a", {}, objects=objects)


def test_save_objects_nested_too_deep_are_refused(tmp_path):
    deep = []
    for _ in range(70):
        deep = [deep]

    with pytest.raises(ValueError, match="is nested more than 64 deep"):
        save(tmp_path, "a", {}, mesh=deep)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "10", True])
def test_bad_timeout_is_refused(tmp_path, timeout):
    with pytest.raises(ValueError, match="is not a number of seconds above 0"):
        save(tmp_path, "a", {}, timeout=timeout)
    with pytest.raises(ValueError, match="is not a number of seconds above 0"):
        load(tmp_path, into={}, timeout=timeout)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"../x": b""}, r"the name '../x' of an extra file is not allowed"),
        ({".x": b""}, r"the name '.x' of an extra file is not allowed"),
        ({"x" * 101: b""}, "of an extra file is not allowed"),
        ({"x": "text"}, r"extra\['x'\] is a str; pass the file's content as bytes"),
    ],
)
def test_save_bad_extra_file_is_refused(tmp_path, extra, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, "a", {}, extra=extra)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda root: retain(root, keep_last=None), "keep_last=None is not a number of checkpoints; use an int"),
        (lambda root: retain(root, keep_last=1.5), "keep_last=1.5 is not a number of checkpoints; use an int"),
        (lambda root: retain(root, keep_last=True), "keep_last=True is not a number of checkpoints; use an int"),
        (lambda root: retain(root, keep_last=1, keep_every=2.5), "keep_every=2.5 is not a number of steps"),
        (lambda root: retain(root, keep_last=1, keep_best="2", metric="loss"), "keep_best='2' is not a number of"),
        (lambda root: retain(root, keep_last=1, keep_best=1, metric=3), "metric=3 is not the name of a metric"),
        (lambda root: gc(root, dead_after="1"), "dead_after='1' is not a number of seconds"),
        (lambda root: gc(root, dry_run="no"), "dry_run='no' is a str; pass True or False"),
        (lambda root: delete(root, None), "tag None is not allowed"),
        (lambda root: pin(root, 1.5), "tag 1.5 is not allowed"),
        (lambda root: save(root, "b", {}, overwrite="false"), "overwrite='false' is a str; pass True or False"),
        (lambda root: save(root, "b", [torch.ones(1)]), "the state is a list; pass {name: tensor, module, opt"),
        (lambda root: save(root, "b", {}, extra=[b""]), "extra is a list; pass {name: content as bytes}, or None"),
        (lambda root: save(root, "b", {}, process_group=1.5), "process_group=1.5 is a float; pass a torch process"),
        (lambda root: async_save(root, "b", {}, memory_limit=1.5), "memory_limit=1.5 is not a number of bytes"),
        (lambda root: save(None, "b", {}), "path=None is not a folder of checkpoints; pass a path or URL"),
        (lambda root: save(b"x", "b", {}), "path=b'x' is not a folder of checkpoints"),
        (lambda root: load("", into={}), "path='' is not a folder of checkpoints"),
        (lambda root: load(root, into={}, strict=None), "strict=None is a NoneType; pass True or False"),
        (lambda root: load(root, into={}, verify="no"), "verify='no' is a str; pass True or False"),
        (lambda root: load(root, into=None), "the state is a NoneType"),
        (lambda root: open_checkpoint(root, verify=0), "verify=0 is a int; pass True or False"),
        (lambda root: open_checkpoint(root).read(["w"]), r"checkpoint 'a' has no tensor \['w'\]"),
        (
            lambda root: open_checkpoint(root).read_box("w", [0.5], [1]),
            r"offsets=\[0.5\] and shape=\[1\] are",
        ),
        (lambda root: open_checkpoint(root).read_box("w", None, [1]), r"offsets=None and shape=\[1\] are not"),
        (lambda root: ShardedTensor((1,), [torch.ones(1)]), "a shard is a Tensor; pass Shard"),
        (lambda root: ShardedTensor((1,), [Shard("w", (0,))]), "a shard is a Shard; pass Shard.tensor, offsets., with"),
    ],
)
def test_argument_of_a_wrong_type_is_one_line_that_says_what_to_pass(tmp_path, call, message):
    save(tmp_path, "a", {"w": torch.ones(4)})

    with pytest.raises(ValueError, match=message) as raised:
        call(tmp_path)

    assert "\n" not in str(raised.value)
    assert [info.tag for info in list_checkpoints(tmp_path)] == ["a"]


def test_load_fallback_with_a_tag_is_refused(tmp_path):
    with pytest.raises(ValueError, match="so tag='a' cannot be given"):
        load(tmp_path, "a", into={}, fallback=True)


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, 2**63])
def test_save_bad_step_is_refused(tmp_path, step):
    with pytest.raises(ValueError, match=f"step={step!r} is not a number of steps"):
        save(tmp_path, "a", {}, step=step)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1.0}, "w is a set, which JSON cannot hold"),
        (torch.ones(2, dtype=torch.complex32), "torch.complex32 cannot be stored; use one of"),
        (torch.ones(2, device="meta"), "a shard must be a dense tensor with data, got device meta"),
        (torch.eye(2).to_sparse(), "a shard must be a dense tensor with data, got device cpu, torch.sparse_coo"),
    ],
    ids=["set", "complex32", "meta", "sparse"],
)
def test_save_value_that_cannot_be_stored_is_refused(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, "a", {"w": value})


def test_sharded_tensor_of_a_wrapper_subclass_is_refused():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError

    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (2,))

    with pytest.raises(ValueError, match="a shard must be a plain tensor, got a Wrapper; pass its local tensor"):
        ShardedTensor((2,), [Shard(wrapper, (0,))])


@pytest.mark.parametrize("shape", [(-1,), (2**63, 0), (1,) * 65])
def test_sharded_tensor_of_a_shape_that_no_reader_takes_is_refused(shape):
    with pytest.raises(ValueError, match="is not a shape of at most 64 dimensions"):
        ShardedTensor(shape, dtype=torch.float32)


def test_sharded_tensor_with_fractions_is_refused():
    with pytest.raises(TypeError, match="'float' object"):
        ShardedTensor((4.9,), [Shard(torch.ones(2), (1,))])
    with pytest.raises(TypeError, match="'float' object"):
        ShardedTensor((4,), [Shard(torch.ones(2), (1.7,))])


@pytest.mark.parametrize("offsets", [(3, 0), (-1, 0), (0,), (0, 0, 0)])
def test_sharded_tensor_shard_outside_is_refused(offsets):
    with pytest.raises(ValueError, match=r"does not lie inside the global shape \[4, 2\]"):
        ShardedTensor((4, 2), [Shard(torch.ones(2, 2), offsets)])


def test_sharded_tensor_without_one_dtype_is_refused():
    two = [Shard(torch.ones(1), (0,)), Shard(torch.ones(1).half(), (1,))]

    with pytest.raises(ValueError, match=r"got torch.float16, torch.float32"):
        ShardedTensor((2,), two)
    with pytest.raises(ValueError, match="got no shard and no dtype; pass dtype="):
        ShardedTensor((2,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [{"tag": "a"}, {"tag": "b"}],
            r"is \('a', None, False, False, False\) on rank 0 but \('b', None, False, False, False\) on rank 1",
        ),
        (
            [{"step": 1}, {"step": 2}],
            r"is \('a', 1, False, False, False\) on rank 0 but \('a', 2, False, False, False\) on rank 1",
        ),
        (
            [{}, {"overwrite": True}],
            r"is \('a', None, False, False, False\) on rank 0 but \('a', None, True, False, False\) on rank 1",
        ),
        ([{}, {"tag": "../b"}], r"failed on 1 of 2 ranks\n  rank 1: tag '../b' is not allowed"),
        ([{}, {"timeout": -1}], r"failed on 1 of 2 ranks\n  rank 1: timeout=-1 is not a number of seconds above 0"),
        ([{}, {"state": {"w": {3}}}], r"rank 1: w is a set, which JSON cannot hold"),
        (
            [{}, {"state": {"w": torch.ones(3)}}],
            r"'w' is F32 \[2\] on rank 0 but F32 \[3\] on rank 1",
        ),
        (
            [{"state": {"w": ShardedTensor((4,), [Shard(torch.ones(2), (r,))])}} for r in (0, 1)],
            r"'w' \[4\]: no rank holds \[3:4\]",
        ),
    ],
)
def test_save_arguments_that_differ_raise_the_same_error_on_every_rank(tmp_path, arguments, message):
    def save_one(ranks):
        given = {"tag": "a", "state": {"w": torch.ones(2)}} | arguments[ranks.rank]
        tag, state = given.pop("tag"), given.pop("state")
        save(tmp_path, tag, state, process_group=ranks, **given)

    first, second = outcomes_on_threads(save_one, world_size=2)

    assert isinstance(first, ValueError)
    with pytest.raises(ValueError, match=message):
        raise first
    assert str(first) == str(second)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([{}, {"tag": "b"}], "tag is 'a' on rank 0 but 'b' on rank 1"),
        ([{}, {"strict": False}], "strict is True on rank 0 but False on rank 1"),
        ([{}, {"into": {"w": {"x"}}}], "failed on 1 of 2 ranks\n  rank 1: w is a set, which JSON cannot hold"),
        ([{}, {"timeout": 0}], "failed on 1 of 2 ranks\n  rank 1: timeout=0 is not a number of seconds above 0"),
        (
            [{}, {"into": {"w": torch.zeros(1).expand(2)}}],
            r"rank 1: 'w' \[0:2\] cannot be loaded into a tensor of strides \[0\], whose elements share memory",
        ),
    ],
)
def test_load_arguments_that_differ_raise_the_same_error_on_every_rank(tmp_path, arguments, message):
    def load_one(ranks):
        given = {"tag": "a", "into": {}} | arguments[ranks.rank]
        load(tmp_path, given.pop("tag"), process_group=ranks, **given)

    save(tmp_path, "a", {"w": torch.ones(2)})
    first, second = outcomes_on_threads(load_one, world_size=2)

    assert isinstance(first, ValueError)
    with pytest.raises(ValueError, match=message):
        raise first
    assert str(first) == str(second)


@pytest.mark.parametrize(("offsets", "shape"), [((0,), (3, 3)), ((2, 2), (3, 1)), ((-1, 0), (1, 1))])
def test_read_box_outside_is_refused(tmp_path, offsets, shape):
    save(tmp_path, "a", {"w": torch.ones(4, 3)})

    with pytest.raises(ValueError, match=r"does not lie inside 'w' \[4, 3\]"):
        open_checkpoint(tmp_path).read_box("w", offsets, shape)


def test_read_unknown_name_is_refused(tmp_path):
    save(tmp_path, "a", {"w": torch.ones(4)})

    with pytest.raises(ValueError, match="checkpoint 'a' has no tensor 'v'"):
        open_checkpoint(tmp_path).read("v")


def test_load_into_a_view_that_overlaps_itself_is_refused_and_others_are_not(tmp_path):
    saved = torch.arange(8.0).reshape(2, 4)
    save(tmp_path, "a", {"w": saved})
    memory = torch.zeros(100)

    with pytest.raises(ValueError, match=r"strides \[1, 1\], whose elements share memory; load into a clone"):
        load(tmp_path, into={"w": memory.as_strided((2, 4), (1, 1))})
    assert not memory.any()
    for strides in [(1, 2), (50, 3), (4, 1), (1, 10)]:
        view = memory.as_strided((2, 4), strides)
        load(tmp_path, into={"w": view})
        assert torch.equal(view, saved)


def test_async_save_memory_limit_that_one_rank_gets_wrong_raises_on_every_rank(tmp_path):
    def save_one(ranks):
        async_save(tmp_path, "a", {}, memory_limit=3 if ranks.rank else None, process_group=ranks)

    first, second = outcomes_on_threads(save_one, world_size=2)

    assert isinstance(first, ValueError)
    assert "failed on 1 of 2 ranks\n  rank 1: memory_limit=3 bytes is too small" in str(first)
    assert str(first) == str(second)
