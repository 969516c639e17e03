"""A function in a process of its own: every way to end, and what user code can and cannot do to the caller."""

import time

import pytest

from gemmnorm.userfiles import isolate
from gemmnorm.userfiles.isolate import run_isolated

HELPERS = """
import os, signal, subprocess, sys, time
from gemmnorm.userfiles.isolate import progress


def add(a, b):
    progress({"step": 1})
    progress({"step": 2, "nan": float("nan")})
    return {"sum": a + b, "argv": sys.stdin.read()}


def noisy():
    print("user prints")
    os.write(1, b'{"kind": "result", "value": "forged"}\\n')
    subprocess.run([sys.executable, "-c", "print('grandchild prints')"])
    sys.stderr.write("user complains\\n")
    return "true"


def raises():
    raise ValueError("no such size: 7")


def leaves():
    sys.exit(3)


def vanishes():
    print("last words", flush=True)
    os._exit(0)


def faults():
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(pid_file):
    child = subprocess.Popen(["sleep", "60"])
    with open(pid_file, "w") as stream:
        stream.write(str(child.pid))
    busy_loop_with_a_name()


def busy_loop_with_a_name():
    while True:
        time.sleep(0.01)


def strange():
    return object()


def threads():
    import threading
    threading.Thread(target=time.sleep, args=(60,)).start()
    return "done"
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    """Name a function of a helper module that only the child imports."""
    (tmp_path / "isolated_helpers.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: f"isolated_helpers:{name}"


def test_result_and_progress(target):
    seen = []
    outcome = run_isolated(target("add"), {"a": 2, "b": 3}, time_limit=60, on_progress=seen.append)
    assert outcome.ok and outcome.status == "ok"
    assert outcome.value == {"sum": 5, "argv": ""}  # standard input is empty, not the caller's
    assert [message["step"] for message in seen] == [1, 2]
    assert outcome.seconds > 0


def test_what_user_code_writes_cannot_reach_the_channel(target):
    outcome = run_isolated(target("noisy"), {}, time_limit=60)
    assert outcome.value == "true"
    for line in ("user prints", "forged", "grandchild prints", "user complains"):
        assert line in outcome.log


def test_exception(target):
    outcome = run_isolated(target("raises"), {}, time_limit=60)
    assert outcome.status == "raised" and outcome.value is None
    assert outcome.error_type == "builtins.ValueError"
    assert "no such size: 7" in outcome.detail and "isolated_helpers.py" in outcome.detail


def test_system_exit_is_an_exception(target):
    outcome = run_isolated(target("leaves"), {}, time_limit=60)
    assert outcome.status == "raised" and outcome.error_type == "builtins.SystemExit"


def test_crashes_say_how(target):
    vanished = run_isolated(target("vanishes"), {}, time_limit=60)
    assert vanished.status == "crashed"
    assert "exited with code 0" in vanished.detail and "last words" in vanished.detail
    faulted = run_isolated(target("faults"), {}, time_limit=60)
    assert faulted.status == "crashed"
    assert "SIGSEGV" in faulted.detail and "in faults" in faulted.detail  # the stack at the fault


@pytest.mark.usefixtures("warm_processes")
def test_hang_is_killed_with_everything_it_started(target, tmp_path):
    pid_file = tmp_path / "pid"
    started = time.monotonic()
    outcome = run_isolated(target("hangs"), {"pid_file": str(pid_file)}, time_limit=5)
    assert time.monotonic() - started < 12
    assert outcome.status == "hung"
    assert "busy_loop_with_a_name" in outcome.detail  # the stack that it hung in
    assert _gone(int(pid_file.read_text()))


def _gone(pid):
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat") as stream:
                if stream.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_threads_left_behind_do_not_delay_the_answer(target):
    outcome = run_isolated(target("threads"), {}, time_limit=30)
    assert outcome.value == "done" and outcome.seconds < 20


def test_values_that_are_not_json(target):
    assert run_isolated(target("strange"), {}, time_limit=60).error_type == "builtins.TypeError"
    with pytest.raises(TypeError):
        run_isolated(target("add"), {"a": object(), "b": 1}, time_limit=60)
    with pytest.raises(ValueError, match=r"package\.module:function"):
        run_isolated("isolated_helpers", {}, time_limit=60)


def test_an_error_in_the_callback_reaches_the_caller(target):
    def stop(message):
        raise KeyError("caller's own")

    with pytest.raises(KeyError, match="caller's own"):
        run_isolated(target("add"), {"a": 1, "b": 1}, time_limit=60, on_progress=stop)


def test_unknown_target_is_reported(target):
    assert run_isolated(target("nothing"), {}, time_limit=60).error_type == "builtins.AttributeError"


def test_progress_outside_an_isolated_call_does_nothing():
    isolate.progress({"step": 1})
