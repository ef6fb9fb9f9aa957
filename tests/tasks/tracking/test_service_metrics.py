"""Metrics of the training service: their text as Prometheus reads it."""

from prometheus_client.parser import text_string_to_metric_families

from tasks.tracking.service_metrics import ServiceMetrics


def samples(metrics):
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
    }


def test_requests_queue_and_runs():
    metrics = ServiceMetrics()
    metrics.set_queue_depth("optim_step", 3)
    metrics.set_engine_up(True)
    metrics.started("optim_step", 0.004)
    metrics.finished("optim_step", 0.3, tokens=7)
    metrics.finished("optim_step", 40.0, "user_error")
    metrics.training("run-1", {"train/loss": 0.5}, 2)
    metrics.training("run-2", {"train/loss": 0.75}, 1)
    metrics.machine({"system/process_memory_megabytes": 2.0}, "engine")
    metrics.forget_run("run-2")
    found = samples(metrics)
    assert found["posttrain_service_queue_depth", "optim_step"] == 3
    assert found["posttrain_service_engine_up",] == 1
    assert found["posttrain_service_requests_total", "ok", "optim_step"] == 1
    assert found["posttrain_service_requests_total", "optim_step", "user_error"] == 1
    assert found["posttrain_service_tokens_total", "optim_step"] == 7
    assert found["posttrain_service_wait_seconds_bucket", "0.0025", "optim_step"] == 0
    assert found["posttrain_service_wait_seconds_bucket", "0.005", "optim_step"] == 1
    assert found["posttrain_service_request_seconds_bucket", "0.5", "optim_step"] == 1
    assert found["posttrain_service_request_seconds_count", "optim_step"] == 2
    assert found["posttrain_service_request_seconds_sum", "optim_step"] == 40.3
    assert found["posttrain_train_loss", "run-1"] == 0.5 and found["posttrain_run_step", "run-1"] == 2
    assert ("posttrain_train_loss", "run-2") not in found
    assert found["posttrain_system_process_memory_bytes", "engine"] == 2 * 2**20
    assert metrics.content_type.startswith("text/plain")
