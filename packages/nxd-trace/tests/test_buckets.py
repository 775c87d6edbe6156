"""Models with buckets: inputs are padded to the nearest bucket; longer inputs are rejected."""

import nxd_trace
import pytest
import torch
import traced_models as models

BUCKETS = [(torch.zeros(2, 4, dtype=torch.long),), (torch.zeros(2, 8, dtype=torch.long),)]


@pytest.mark.parametrize("kernel", [models.fitting_kernel, models.python_kernel, None])
def test_inputs_are_padded_to_the_nearest_bucket_also_after_loading(trace, tmp_path, kernel):
    config = nxd_trace.BucketModelConfig(kernel)
    model = trace(models.total, BUCKETS, bucket_config=config)
    nxd_trace.parallel_model_save(model, tmp_path / "model")

    def check(model):
        for length, bucket in [(1, 4), (4, 4), (5, 8), (8, 8)]:
            total, padded_length = model(torch.ones(2, length, dtype=torch.long))
            assert total.tolist() == [length, length]
            assert padded_length.item() == bucket

    check(model)
    with pytest.raises(ValueError, match="length 9 along dim 1, more than the largest bucket's 8; shorten the input"):
        model(torch.ones(2, 9, dtype=torch.long))
    model.close()
    if kernel is models.python_kernel:
        with pytest.raises(nxd_trace.ModelFolderError, match="plain Python, which is not saved; pass the BucketModel"):
            nxd_trace.parallel_model_load(tmp_path / "model")
    again = config if kernel is models.python_kernel else None
    with nxd_trace.parallel_model_load(tmp_path / "model", bucket_config=again) as loaded:
        check(loaded)


def test_buckets_work_on_views_of_a_shared_state_buffer(trace):
    config = nxd_trace.BucketModelConfig(
        None,
        shared_state_buffer=[torch.zeros(6, 8, dtype=torch.float64)],
        shared_state_buffer_preprocessor=models.first_rows,
        func_kwargs=[{"length": 2}, {"length": 6}],
    )
    row = torch.ones(1, 8, dtype=torch.float64)
    inputs = [(row, torch.zeros(1, dtype=torch.long)), (row.repeat(2, 1), torch.zeros(2, dtype=torch.long))]
    model = trace(models.cache_of_length, inputs, bucket_config=config)

    first = model(row, torch.tensor([0]))
    both = model(row.repeat(2, 1), torch.tensor([1, 5]))
    small_again = model(row, torch.tensor([0]))

    assert (first[0], both[0], small_again[0]) == (2.0, 6.0, 4.0)  # a row is 1, and the degree is added


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: nxd_trace.BucketModelConfig(3), TypeError, "bucket_kernel must be a function without arguments"),
        (
            lambda: nxd_trace.BucketModelConfig(None, shared_state_buffer_preprocessor=models.first_rows),
            ValueError,
            "needs shared_state_buffer",
        ),
        (
            lambda: nxd_trace.BucketModelConfig(None, func_kwargs=[{}]).kwargs_of(1, 2),
            ValueError,
            "1 entries for 2 buckets",
        ),
        (
            lambda: nxd_trace.parallel_model_trace(
                models.total, BUCKETS[0], bucket_config=nxd_trace.BucketModelConfig(None)
            ),
            ValueError,
            "must be a list of inputs, one entry per bucket",
        ),
    ],
)
def test_wrong_bucket_configurations_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()
