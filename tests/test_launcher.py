# SPDX-License-Identifier: Apache-2.0
"""The launcher of process tests always ends, and says how each process did."""

import signal
import sys
import time

from launcher import Rank, run


def python(*programs: str, timeout: float = 30.0, grace: float = 30.0) -> list[Rank]:
    return run(
        [[sys.executable, "-S", "-c", program] for program in programs],
        timeout=timeout,
        grace=grace,
    )


def test_it_collects_status_and_output_of_every_process():
    loud = "import sys; sys.stderr.write('x' * 2_000_000); print('end')"
    told = "print('RESULT', '[\"a\", [1]]'); print('RESULT [\"b\", null]')"
    one, two = python(loud, told)
    assert one.status == two.status == 0 and not one.killed
    assert one.output.endswith("end\n") and len(one.output) > 2_000_000
    assert two.results() == {"a": [1], "b": None}


def test_it_ends_what_hangs():
    start = time.monotonic()
    hanging, done = python("import time; time.sleep(60)", "pass", timeout=0.5)
    assert time.monotonic() - start < 10
    assert (hanging.status, hanging.killed) == (-signal.SIGKILL, True)
    assert (done.status, done.killed) == (0, False)


def test_one_that_fails_gives_the_others_some_time():
    start = time.monotonic()
    failing, hanging, slow = python(
        "raise SystemExit(3)",
        "import time; time.sleep(60)",
        "import time; time.sleep(0.3)",
        grace=1.0,
    )
    assert time.monotonic() - start < 10
    assert (failing.status, failing.killed) == (3, False)
    assert (slow.status, slow.killed) == (0, False)
    assert hanging.killed and hanging.seconds >= failing.seconds + 1.0


def test_one_that_is_killed_counts_as_failed():
    lost, hanging = python(
        "import os; os.kill(os.getpid(), 9)", "import time; time.sleep(60)", grace=0.1
    )
    assert (lost.status, lost.killed) == (-signal.SIGKILL, False)
    assert hanging.killed
