"""Options of the whole test run."""

import atexit
import gc
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

UNTIL = "NEARFLASH_TESTS_UNTIL"
"""The environment variable of the second since the epoch after which no further test begins."""
_LEFT_OUT = pytest.StashKey[Counter[str]]()
"""How many tests of each area (folder of tests/) only make test-full has."""
_DRAWS = pytest.StashKey[dict[str, dict]]()
"""The state of each test module's `RNG` before its first test."""
REPEATED_STALLS = ("source", "sink", "bursty")
"""Patterns that add to `none` and `both` what proofs hold for most units; `both` stalls sources and sinks."""

# Designs are made of millions of small objects that stay: by default a quarter of making one goes into looking at them.
gc.set_threshold(20_000, 20, 20)
gc.disable()  # while tests are collected

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels for a GPU run on the CPU; read when they are imported


# The workers share the cores: threads of torch that wait for each other on a core that another worker has only burn it.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // _WORKERS)))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def own_threads():
    """Commands that run in this process set torch's threads, which the tests behind them would keep."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(before or int(os.environ["OMP_NUM_THREADS"]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        action="append",
        help="devices that tests/system runs on, for example verilator:update-tiny; may be given several times",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers of xdist must name the same tests: a set's text is in order of hashes, an object's has its address."""
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {}).values()
        sets = (value for value in values if isinstance(value, set | frozenset) and len(value) > 1)
        if re.search(r" at 0x[0-9a-f]+", item.nodeid) or any(repr(value) in item.nodeid for value in sets):
            raise pytest.UsageError(f"{item.nodeid}: give `parametrize` ids that are the same in every process")
    _mark_combinations(items)


def _mark_combinations(items: list[pytest.Item]) -> None:
    """Mark `full` what repeats: `make test` has the fewest combinations with every value of each parameter."""
    combinations: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker("full"):
            continue
        if item.callspec.params.get("stalls") in REPEATED_STALLS:
            item.add_marker("full")
        else:
            combinations.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for left in combinations.values():
        values = {item: set(enumerate(item.callspec._idlist)) for item in left}  # one for each `parametrize`, in order
        unseen = set().union(*values.values())
        while unseen:
            item = max(left, key=lambda item: len(unseen & values[item]))
            left.remove(item)
            unseen -= values[item]
        for item in left:
            item.add_marker("full")


def pytest_collection_finish() -> None:
    """What collecting made stays: walking it takes half a second each time that a test, or transformers, collects, and
    longer as pytest ends. Only the interpreter's end walks it, or nanobind takes what is left for leaks.
    """
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)


def pytest_deselected(items: list[pytest.Item]) -> None:
    areas = (item.nodeid.split("/")[1] for item in items if item.get_closest_marker("full"))
    items[0].config.stash.setdefault(_LEFT_OUT, Counter()).update(areas)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _rewind_draws(item)
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip("time is up: make test-full has it")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _rewind_draws(item)  # fixtures of the module draw only before its first test


def _rewind_draws(item: pytest.Item) -> None:
    """A module's `RNG` begins anew for each test: its values must not depend on which tests its worker ran before."""
    module = getattr(item, "module", None)
    if hasattr(module, "RNG"):
        generator = module.RNG.bit_generator
        generator.state = item.config.stash.setdefault(_DRAWS, {}).setdefault(module.__name__, generator.state)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(_LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    node.config.stash[_LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if areas := config.stash.get(_LEFT_OUT, None):
        counts = ", ".join(f"{area} {count}" for area, count in sorted(areas.items()))
        terminalreporter.write_line(f"{areas.total()} tests are only in make test-full: {counts}")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores it, and Python then raises no KeyboardInterrupt, which tests of interrupts need.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_state_of_the_users(tmp_path_factory):
    """The rates of this machine's drives, and its user's calibrations, would decide what tests see."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(name, str(folder))
        yield


@pytest.fixture(scope="session")
def gpu():
    """torch's name of a GPU; where there is none the CPU stands for it, kernels under Triton's interpreter."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _run_rank(rank, port, function, arguments, found):
    from nearflash.verify.fixtures.forked import keep_one_thread

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(port)}  # fmt: skip
    keep_one_thread()
    try:
        done = function(*arguments)
    except Exception as error:
        done = repr(error)
    found.put((rank, done))
    found.close()
    found.join_thread()
    os._exit(0)


@pytest.fixture
def fork_ranks():
    """Calls a function in two processes, as torchrun does, but forked: nothing is imported again. Results by rank; of
    one that raises, the error's text.
    """

    def call(function, *arguments):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        forked = multiprocessing.get_context("fork")
        found = forked.Queue()
        ranks = [forked.Process(target=_run_rank, args=(rank, port, function, arguments, found)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        try:
            return dict(found.get(timeout=100) for _ in ranks)
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()

    return call


@pytest.fixture(scope="module")
def tiny_model():
    """A random model of two layers, its attention to be replaced."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from nearflash.inference.calibration.window import NAME

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, attn_implementation=NAME,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
