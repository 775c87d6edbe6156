"""What gets a run's metrics besides their file. Tests of W&B and MLflow run where these are installed."""

import struct

import pytest
from nxd_trainer.report import MetricsLog, open_trackers, read_records

SETTINGS = {"train": {"steps": 30, "dtype": "float32"}, "output": "runs/a"}


def reported(folder, *names, first_step=0, say=print):
    folder.mkdir(exist_ok=True)
    trackers = open_trackers(names, folder, first_step=first_step, settings=SETTINGS, say=say)
    return MetricsLog(folder, first_step=first_step, trackers=trackers)


def test_without_tensorboard_one_line_says_what_to_install(tmp_path, record, without):
    without("tensorboard")
    said = []

    with reported(tmp_path, "tensorboard", say=said.append) as metrics:
        metrics.log(record(1))

    assert said == [
        "TensorBoard scalars skipped: tensorboard is not installed (pip install 'nxd-trainer[tensorboard]')"
    ]
    assert read_records(metrics.file) == [record(1)]
    assert [it.name for it in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_tracker_that_is_asked_for_and_not_installed_is_refused(tmp_path, without, name):
    without(name)

    with pytest.raises(
        ValueError, match=rf"train\.report_to={name}: {name} is not installed \(pip install 'nxd-trainer\[{name}\]'\)"
    ):
        reported(tmp_path, name)


def test_tensorboard_gets_each_scalar_once_at_its_step(tmp_path, record):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with reported(tmp_path, "tensorboard") as metrics:
        for step in (10, 20, 30):
            metrics.log(record(step, held_out_loss=5.0 if step == 20 else None, grad_norm=float(step), throughput=2.0))
    with reported(tmp_path, "tensorboard", first_step=20) as metrics:
        metrics.log(record(30))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()

    assert [(e.step, e.value) for e in events.Scalars("loss/train")] == [
        (10, 1.0),
        (20, 0.5),
        (30, pytest.approx(1 / 3)),
    ]
    assert [(e.step, e.value) for e in events.Scalars("loss/held_out")] == [(20, 5.0)]
    assert [e.step for e in events.Scalars("train/grad_norm")] == [10, 20]
    assert set(events.Tags()["scalars"]) == {
        "loss/train",
        "loss/held_out",
        "train/grad_norm",
        "train/learning_rate",
        "train/tokens",
        "speed/tokens_per_second",
        "speed/peak_memory_bytes",
        # as existing scripts name them
        "step loss",
        "learning rate",
        "throughput",
        "grad-norm",
    }
    assert [e.value for e in events.Scalars("throughput")] == [2.0, 2.0]


@pytest.mark.slow
def test_mlflow_gets_each_scalar_at_its_step_and_a_resumed_run_goes_on(tmp_path, record, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'nxd-trainer[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "run"

    for steps, first_step in (([10, 20], 0), ([30], 20)):
        with reported(folder, "mlflow", first_step=first_step) as metrics:
            for step in steps:
                metrics.log(record(step, grad_norm=float("nan")))

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow/mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("nxd").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss/train")
    assert [(it.step, it.value) for it in history] == [(10, 1.0), (20, 0.5), (30, pytest.approx(1 / 3))]
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {"train.steps": "30", "train.dtype": "float32"}
    assert "train/grad_norm" not in run.data.metrics


def log_records(content):
    """The records of a file in the format of LevelDB's log, which fits into one of its blocks."""
    while len(content) > 7:
        _, length, kind = struct.unpack("<IHB", content[:7])
        assert kind == 1
        yield content[7 : 7 + length]
        content = content[7 + length :]


@pytest.mark.slow
def test_wandb_gets_each_scalar_at_its_step_and_a_resumed_run_goes_on(tmp_path, record, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="pip install 'nxd-trainer[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"

    for steps, first_step in (([10, 20], 0), ([30], 20)):
        with reported(folder, "wandb", first_step=first_step) as metrics:
            for step in steps:
                metrics.log(record(step))

    wandb.teardown()  # its server process, which otherwise ends with this one
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    found = {}
    ids = set()
    for file in folder.glob("wandb/offline-run-*/run-*.wandb"):
        for content in log_records(file.read_bytes()[7:]):  # after the header
            read = Record.FromString(content)
            if read.HasField("history"):
                values = {it.key or "/".join(it.nested_key): it.value_json for it in read.history.item}
                found[int(values["_step"])] = float(values["loss/train"])
            if read.HasField("run"):
                ids.add((read.run.run_id, read.run.display_name))
    assert found == {10: 1.0, 20: 0.5, 30: pytest.approx(1 / 3)}
    assert [name for _, name in ids] == ["run"]
