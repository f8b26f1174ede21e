"""Programs that aim at the judge, at the process that asks them, and at what limits forget. As in `code_cheats`."""

from __future__ import annotations

from typing import Any

JUDGE = {
    "endless_for_the_judge": (
        "def f(x): return 10**15",
        ["assert list(range(f(3))) == [0, 1, 2]", "assert 2 ** f(3) == 8", "assert 'x' * f(3) == 'xxx'"],
    ),
    "number_that_takes_for_ever_to_read": (
        """
        from fractions import Fraction
        class F(Fraction):
            def __str__(self): return "1e999999999"
        def f(x): return F(1)
        """,
        ["assert f(1) == 3", {"fn_name": "f", "inputs": [[1]], "outputs": [3]}],
    ),
    "number_that_takes_for_ever_to_write": (
        "def f(x): return 1 << 8_000_000",
        ["assert f(1) == 'x', f'got {f(1)}'"],
    ),
    "no_number": (
        "from decimal import Decimal\ndef f(x): return Decimal('sNaN') if x else float('nan')",
        [
            "assert abs(f(0) - 0.5) < 1e-3",
            "assert f(1) in {3}",
            "assert f(0) >= 1 and f(0) <= 1",
            {"fn_name": "f", "inputs": [[0]], "outputs": [1.5]},
        ],
    ),
    "infinite": (
        "def f(x): return float('inf')",
        [
            "import math\nassert math.isclose(f(1), 1e308)",
            {"fn_name": "f", "inputs": [[1]], "outputs": [1e308]},
            {"fn_name": "f", "inputs": [[1]], "outputs": [10**400]},
        ],
    ),
    "text_that_formats": ("def f(x): return '{0}'", ["assert f('a').format('b') == 'c'"]),
    "much_comes_back": ("def f(x): x.extend([0] * 400_000)", ["x = [2, 1]\nf(x)\nassert x == [1, 2]"]),
    "odd_replies_by_hand": (
        """
        import os, json
        odd = [{"raised": ["ExceptionGroup"]}, {"raised": ["UnicodeDecodeError"], "message": {}}, {"raised": {"a": 1}}]
        kinds = [("int", 7), ("range", [1, 2, 0]), ("set", [[1]]), ("Fraction", "1/0"), ("endless", [])]
        odd += [{"returned": {"type": kind, "value": value}} for kind, value in kinds]
        def f(x):
            for descriptor in range(3, 64):
                try: os.write(descriptor, (json.dumps(odd[x]) + "\\n").encode())
                except OSError: pass
            os._exit(0)
        """,
        [[f"assert f({number}) == 1" for number in range(8)]],
    ),
}

PARENT = {
    "interrupts_its_parent": "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGINT)\nf(1)",
    "other_signals_to_its_parent": """
        import os
        for number in (1, 3, 4, 6, 8, 10, 11, 12, 13, 14, 15, 24, 25):
            try: os.kill(os.getppid(), number)
            except OSError: pass
        def f(x): return 1
    """,
    "limits_its_parent": """
        import os, resource
        for pid in (1, os.getppid()):
            for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
                try: resource.prlimit(pid, limit, (0, 0))
                except OSError: pass
        def f(x): return "y" * (1 << 18)
        print(f(1))
    """,
    "writes_into_its_parent": """
        import ctypes, os
        libc = ctypes.CDLL(None)
        class Piece(ctypes.Structure): _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]
        zeros = ctypes.create_string_buffer(4096)
        def f(x):
            for line in open("/proc/self/maps"):
                start, end = (int(number, 16) for number in line.split()[0].split("-"))
                if " rw-p " in line:
                    own, other = Piece(ctypes.addressof(zeros), 4096), Piece(start, 4096)
                    libc.process_vm_writev(os.getppid(), ctypes.byref(own), 1, ctypes.byref(other), 1, 0)
                    try: open(f"/proc/{os.getppid()}/mem", "r+b", 0).seek(start).write(zeros)
                    except (OSError, AttributeError): pass
        f(1)
    """,
    "another_program_in_its_place": """
        import os
        line = "{\\\\"number\\\\": 0, \\\\"reply\\\\": \\\\"{\\\\\\\\\\\\"returned\\\\\\\\\\\\": true}\\\\"}"
        os.execv("/bin/sh", ["sh", "-c", f'for n in 0 1 2 3 4 5 6 7 8 9; do echo "{line}" >&$n; done'])
    """,
    "hooks_at_the_end": """
        import os, sys
        sys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)
        sys.addaudithook(lambda event, args: os._exit(0) if event.startswith("sys.") else None)
        def f(x): raise ValueError
        f(1)
    """,
}

LIMITS = {
    "memory_without_an_address": """
        import os
        def f(x):
            kept = [os.memfd_create("x") for _ in range(16)]
            for descriptor in kept:
                for _ in range(64): os.write(descriptor, bytes(1 << 20))
        f(1)
    """,
    "memory_of_all_together": """
        import mmap, os, time
        def f(x):
            for _ in range(6):
                if os.fork() == 0: break
            kept = []
            try:
                while True:
                    kept.append(mmap.mmap(-1, 32 << 20))
                    kept[-1].write(bytes(32 << 20))
            except (OSError, MemoryError, ValueError): pass
            time.sleep(1)
        f(1)
    """,
    "shared_segments": """
        import ctypes
        libc = ctypes.CDLL(None)
        def f(x): return [libc.shmget(0, 64 << 20, 0o1600) for _ in range(64)]
        f(1)
    """,
    "user_wide_counts": """
        import ctypes, signal
        libc = ctypes.CDLL(None)
        for _ in range(300): libc.inotify_init()
        for _ in range(100_000):
            if libc.timer_create(0, None, ctypes.byref(ctypes.c_void_p())): break
        def f(x): return 1
    """,
}

JUDGE_CHEATS: dict[str, Any] = {**JUDGE, **PARENT, **LIMITS}
