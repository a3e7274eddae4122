"""Two processes that talk over the loopback address: same verdict, same state, nobody waits."""

import json
import pathlib
import time

import numpy as np
import pytest
from processes import environment, free_ports, run_all, started

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
TIMEOUT = 50  # seconds, two starts of TensorFlow included
CASES = ["", "0", "1", "01", ""]  # the workers that overflow, step by step


def tensorflow_workers(directory, arguments):
    """Commands, environments and files of results of two workers."""
    results = [directory / f"results_{i}.jsonl" for i in range(2)]
    commands = [[HERE / "worker_tensorflow.py", r, *arguments] for r in results]
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    environments = [
        environment(
            TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}})
        )
        for i in range(2)
    ]
    return commands, environments, results


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def expected_states(gradient, window=1, cases=CASES):
    """Momentum descent from [1, 2] at rate 1/2 on the finite steps of `cases`, in NumPy."""
    weights, momentum = np.float32([1.0, 2.0]), np.zeros(2, "float32")
    scale, finite, skipped, in_a_row, counted = 1024.0, 0, 0, 0, 0
    for step, case in enumerate(cases, start=1):
        counted = 0 if case else counted + 1
        if case:
            scale, skipped, in_a_row = scale / 2, skipped + 1, in_a_row + 1
        else:
            finite, in_a_row = finite + 1, 0
            if finite % window == 0:
                momentum = momentum / 2 - np.float32(gradient) / 2
                weights = weights + momentum
        yield {
            "dense/kernel": weights[:, None].tolist(),
            "kernel_momentum": momentum[:, None].tolist(),
            "dynamic_scale": scale,
            "skipped_steps": skipped,
            "loss_scale_optimizer/iteration": step,
            "sgd/iteration": finite,
            "consecutive_skips": in_a_row,
            "step_counter": counted,
        }


def assert_states(states, expected):
    for state, wanted in zip(states, expected, strict=True):
        received = {end: x for end in wanted for path, x in state.items() if path.endswith(end)}
        assert received == wanted


@pytest.mark.only("tensorflow")
def test_multi_worker_mirrored(tmp_path):
    """A custom loop, in a graph, eagerly and with accumulation: the whole state after each step.

    Worker 0 brings the gradient [1, -1/2], worker 1 [2, -1/2]; the step is on their mean.
    """
    runs = {"kmp,graph": 1, "kmp,eager": 1, "accumulation,graph": 2}
    arguments = ["/".join(runs), *CASES]
    commands, environments, results = tensorflow_workers(tmp_path, arguments)
    run_all(commands, environments, tmp_path, TIMEOUT)
    states, of_the_other = (lines(path) for path in results)
    assert states == of_the_other
    assert len(states) == len(runs) * len(CASES)
    for i, window in enumerate(runs.values()):
        of_this_run = states[i * len(CASES) : (i + 1) * len(CASES)]
        assert_states(of_this_run, expected_states([1.5, -0.5], window))
    assert [path.with_suffix(".writes").read_text() for path in results] == ["True", "False"]


@pytest.mark.only("tensorflow")
def test_keras_still_strands_the_workers_that_did_not_overflow(tmp_path):
    """Worker 0 skips the step, the all-reduce in it included; worker 1 is never answered."""
    commands, environments, results = tensorflow_workers(tmp_path, ["keras,graph", "", "0"])
    deadline = time.monotonic() + TIMEOUT
    with started(commands, environments, tmp_path):
        while len(lines(results[0])) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(lines(results[0])) == 2, (tmp_path / "process_0.log").read_text()[-3000:]
        time.sleep(3)  # a step takes milliseconds
        assert len(lines(results[1])) == 1


def torch_workers(directory, arguments):
    """Commands, environments and files of results of two processes that meet in a file."""
    results = [directory / f"results_{i}.jsonl" for i in range(2)]
    commands = [
        [HERE / "worker_torch.py", rank, directory / "meeting_point", result, *arguments]
        for rank, result in enumerate(results)
    ]
    environments = [environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")] * 2
    return commands, environments, results


@pytest.mark.only("torch")
@pytest.mark.parametrize(
    "reduction, window",
    [("ddp", 1), ("ddp", 2), ("nan_loss", 1), ("all_reduce", 1), ("none", 1), ("fit", 1)],
)
def test_torch_distributed(tmp_path, reduction, window):
    """What kmp does when `torch.distributed` is initialised, in a custom loop of two processes.

    kmp sends nothing to other processes. Where their gradients are averaged, one that is not finite
    is so in all, and they come to the same decision.

    - "ddp": `DistributedDataParallel` averages the gradients while it runs backwards. The weights
      and all of the optimizer's state are the same in all processes.
    - "nan_loss": likewise, where the loss of one process is NaN, which the other does not see. The
      scale falls in both, as after an overflow.
    - "all_reduce": the loop averages the gradients itself before `apply`. The same.
    - "none": nobody averages. Each process trains and skips by itself, and none waits for another.
    - "fit": likewise; and of a `fit` in each process, with one `log_dir`, process 0 alone writes.
    """
    commands, environments, results = torch_workers(tmp_path, [reduction, window, *CASES])
    run_all(commands, environments, tmp_path, TIMEOUT)
    states = [lines(path) for path in results]
    if reduction == "fit":
        files = [x.parent.name for x in (tmp_path / "logs").rglob("*tfevents*")]
        assert sorted(files) == ["logs", "train"]  # of one process
    if reduction in ("none", "fit"):
        for worker, own in enumerate(states):
            cases = ["x" if str(worker) in case else "" for case in CASES]
            assert_states(own, expected_states([1.0 + worker, -0.5], window, cases))
            overflows = [[row[4] for row in s[path]] for s in own for path in s if "health" in path]
            assert overflows[-1] == [sum(str(worker) in case for case in CASES)]
    else:
        assert states[0] == states[1]
        for own in states:
            assert_states(own, expected_states([1.5, -0.5], window))
