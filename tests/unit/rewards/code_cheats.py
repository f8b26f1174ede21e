"""Programs that want a score without solving the task. (program, ground truths), or a program for the usual ones."""

from __future__ import annotations

import uuid
from typing import Any

SECRET = f"tok-{uuid.uuid4().hex}"
USUAL: list[Any] = [
    f"assert f(1) == {SECRET!r}",
    {"fn_name": "f", "inputs": [[1]], "outputs": [SECRET]},
    {"inputs": ["1"], "outputs": [SECRET]},
]
"""What a cheat is tried on, unless it names tests of its own."""

OBJECTS = {
    "always_equal": "class E:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\ndef f(x): return E()",
    "text_that_equals": """
        class E(str):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __hash__(self): return 0
        def f(x): return E()
        print(E())
    """,
    "number_that_equals": (
        "class E(int):\n    __eq__ = __le__ = __ge__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
        "def f(x): return E(7)",
        [
            "assert f(1) == 42",
            "assert f(1) >= 42",
            "assert 42 <= f(1)",
            {"fn_name": "f", "inputs": [[1]], "outputs": [42]},
        ],
    ),
    "hash": (
        "class E:\n    __hash__ = lambda s: hash('tok-')\n    __eq__ = lambda s, o: True\ndef f(x): return E()",
        [f"assert f(1) in {{{SECRET!r}: 1}}", f"assert {{f(1)}} == {{{SECRET!r}}}", f"assert f(1) in [{SECRET!r}]"],
    ),
    "truth": ("class E:\n    __bool__ = lambda s: True\ndef f(x): return E()", ["assert f(1)", "assert all([f(1)])"]),
    "class_attribute": """
        class E:
            __class__ = str
            __eq__ = lambda s, o: True
            def __getattr__(self, name): return lambda *a, **k: True
        def f(x): return E()
    """,
    "metaclass": (
        "class M(type):\n    __instancecheck__ = __subclasscheck__ = __eq__ = lambda *a: True\n"
        "    __hash__ = type.__hash__\n"
        "class E(metaclass=M): pass\ndef f(x): return E",
        ["assert f(1) == 3", "assert isinstance(f(1), int)", "assert isinstance(3, f(1)) and f(1) == 3"],
    ),
    "getattribute": (
        "class E:\n    def __getattribute__(self, name): return lambda *a: True\ndef f(x): return E()",
        ["assert f(1).value == 3", f"assert f(1).upper() == {SECRET!r}", "assert f(1) == 3"],
    ),
    "contains": (
        "class E:\n    __contains__ = lambda s, o: True\n    __iter__ = lambda s: iter([])\n    __len__ = lambda s: 3\n"
        "def f(x): return E()",
        [f"assert {SECRET!r} in f(1)", f"assert len(f(1)) == 3 and {SECRET!r} in f(1)"],
    ),
    "reflected": (
        "class E:\n    __sub__ = __rsub__ = __abs__ = lambda *a: E()\n    __lt__ = __gt__ = lambda *a: True\n"
        "def f(x): return E()",
        ["assert abs(f(1) - 0.5) < 1e-6", "assert 0.5 - f(1) < 1e-6", "assert -1e-6 < f(1)"],
    ),
    "list_subclass": (
        "class E(list):\n    __eq__ = lambda s, o: True\n    sort = reverse = lambda *a, **k: None\n"
        "def f(x): return E([7])",
        ["assert f(1) == [1, 2]", "assert sorted(f(1)) == [1, 2]", "assert [1, 2] == f(1)"],
    ),
    "methods_of_text": (
        "class E(str):\n    startswith = strip = __contains__ = lambda *a: True\ndef f(x): return E('x')",
        ["assert f(1).startswith('tok')", "assert f(1).strip() == 'tok'", "assert 'tok' in f(1)"],
    ),
    "reduce": """
        class E:
            def __reduce__(self): return (eval, ("print(1)",))
        def f(x): return E()
    """,
    "opaque_format": (
        "class E:\n    __format__ = __str__ = __repr__ = lambda s, *a: 'x'\n    __eq__ = lambda s, o: True\n"
        "def f(x): return E()",
        [f"assert str(f(1)) == {SECRET!r}", f"assert f'{{f(1)}}' == {SECRET!r}"],
    ),
    "class_under_test": (
        "class Box:\n    def __getattr__(self, name):\n        class E:\n            __eq__ = lambda s, o: True\n"
        "            __call__ = lambda s, *a: E()\n        return E()",
        [f"b = Box()\nb.put({SECRET!r})\nassert b.size() == 1", "b = Box()\nb.put(1)\nassert b.count == 1"],
    ),
}

NAMES = {
    "module_of_choice": """
        import sys, types, os
        os.makedirs("/tmp/test_x", exist_ok=True)
        open("/tmp/test_x.py", "w").write("import os; os.write(1, b'passed')")
        f = types.ModuleType("unittest.__main__")
    """,
    "own_math": (
        "class math:\n    isclose = fabs = staticmethod(lambda *a, **k: True)\n    pi = 0\ndef f(x): return 0",
        ["assert math.isclose(f(1), 0.5)", "import math\nassert math.isclose(f(1), 0.5)"],
    ),
    "own_counter": (
        "class Counter:\n    def __init__(self, *a): pass\n    __eq__ = lambda s, o: True\ndef f(x): return []",
        ["assert Counter(f('aab')) == Counter('aab')"],
    ),
    "own_builtins": (
        "import builtins\nbuiltins.len = len = sorted = abs = lambda *a: 3\nbuiltins.sorted = lambda x: []\n"
        "def f(x): return []",
        ["assert len(f(1)) == 3", "assert sorted(f([2, 1])) == [1, 2]"],
    ),
    "own_check": (
        "def check(candidate): pass\ndef f(x): return 0",
        ["def check(candidate):\n    assert candidate(1) == 2\ncheck(f)"],
    ),
    "own_names_of_the_judge": (
        "__excuse__ = __statement__ = __attribute__ = Callee = Tests = lambda *a: None\ndef f(x): return 0",
        ["assert f(1) == 2"],
    ),
    "no_function": "f = print = None",
}

EXITS = {
    "exit": "import sys\nsys.exit(0)",
    "exit_in_call": "import sys\ndef f(x): sys.exit(0)\nf(1)",
    "hard_exit": "import os\nos._exit(0)",
    "hard_exit_in_call": "import os\ndef f(x): os._exit(0)\nf(1)",
    "exit_for_an_exception": (
        "import os\ndef f(x): os._exit(0)",
        [
            "try:\n    f(-1)\n    assert False\nexcept:\n    pass",
            "try:\n    f(-1)\nexcept BaseException:\n    pass\nelse:\n    raise ValueError",
        ],
    ),
    "system_exit_for_an_exception": (
        "def f(x): raise SystemExit",
        [
            "try:\n    f(-1)\n    assert False\nexcept Exception:\n    pass",
            "try:\n    f(-1)\n    assert False\nexcept:\n    pass",
        ],
    ),
    "stop_iteration": (
        "def f(x): raise StopIteration",
        ["assert all(map(f, [1, 2]))", "assert not any(x != 2 for x in map(f, [1]))", "assert list(map(f, [1])) == []"],
    ),
    "stop_iteration_by_name": (
        "class StopIteration(Exception): pass\nclass E(StopIteration): pass\ndef f(x): raise E",
        ["assert all(map(f, [1, 2]))"],
    ),
    "assertion_error": ("def f(x): raise AssertionError", ["try:\n    assert f(1) == 2\nexcept ValueError:\n    pass"]),
    "generator_exit": ("def f(x): raise GeneratorExit", ["assert all(map(f, [1, 2]))"]),
    "exception_that_lies": """
        class E(Exception):
            def __str__(self): raise SystemExit
            __class__ = property(lambda s: 1 / 0)
        def f(x): raise E
        f(1)
    """,
    "atexit": """
        import atexit, os
        def last():
            for descriptor in range(64):
                try: os.write(descriptor, b'{"verdicts": [true], "questions": []}')
                except OSError: pass
            os._exit(0)
        atexit.register(last)
        def f(x): return None
    """,
    "signals": """
        import os, signal
        for number in range(1, 65):
            try: signal.signal(number, lambda *a: os._exit(0))
            except (OSError, ValueError): pass
        def f(x): os.kill(os.getpid(), signal.SIGTERM)
        f(1)
    """,
    "kills_all": "import os, signal\ndef f(x): os.kill(-1, signal.SIGKILL)\nf(1)",
    "kills_its_parent": "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGKILL)\nf(1)",
    "stops_its_parent": "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGSTOP)\nf(1)",
}

ARGUMENTS = {
    "empties_an_argument": (
        "def f(x):\n    x.clear()\n    return []",
        [
            "x = [3, 1, 2]\nassert f(x) == sorted(x)", "x = [3, 1, 2]\ny = f(x)\nassert y == sorted(x)",
            "x = {'a': 1}\nassert f(x) == list(x)", "x = [3, 1]\nassert len(f(x)) == len(x) and f(x) == sorted(x)",
            "def check(g):\n    x = [3, 1]\n    assert g(x) == sorted(x)\ncheck(f)",
        ],
    ),
    "changes_what_is_expected": (
        "def f(x):\n    x.append(7)\n    return [7]",
        ["expected = []\nassert f(expected) == expected", "e = [1]\nassert f(e) + [] == e"],
    ),
    "changes_objects_in_arguments": (
        "class E(list):\n    __eq__ = lambda s, o: True\ndef f(x): x[:] = [E()]",
        ["x = [3, 1]\nf(x)\nassert x == [1, 3]"],
    ),
    "keeps_arguments": (
        "kept = []\ndef f(x):\n    kept.append(x)\n    for k in kept: k[:] = [1, 2]\n    return [1, 2]",
        ["a, b = [2, 1], [4, 3]\nassert f(a) == [1, 2] and a == [2, 1] and f(b) == [3, 4]"],
    ),
}  # fmt: skip

SEARCH = """
    import gc, os, re, sys
    pattern = re.compile("to" + "k-[0-9a-f]{32}")
    def find(text):
        found = pattern.search(text)
        return found and found[0]
    def search():
        frame, waiting, seen = sys._getframe(), [sys.modules, gc.get_objects(), dict(os.environ), sys.argv], set()
        while frame:
            waiting += [frame.f_locals, frame.f_globals]
            frame = frame.f_back
        while waiting:
            thing = waiting.pop()
            if id(thing) in seen: continue
            seen.add(id(thing))
            if isinstance(thing, bytes): thing = thing.decode("latin-1")
            if isinstance(thing, str) and find(thing): return find(thing)
            waiting.extend(gc.get_referents(thing))
        for top, _, names in [entry for root in ("/tmp", "/program", ".") for entry in os.walk(root)]:
            for name in names:
                text = open(os.path.join(top, name), errors="replace").read()
                if find(text): return find(text)
        for descriptor in range(256):
            try:
                os.set_blocking(descriptor, False)
                text = os.read(descriptor, 1 << 20).decode("latin-1")
                os.lseek(descriptor, 0, 0)
                text += os.read(descriptor, 1 << 20).decode("latin-1")
                if find(text): return find(text)
            except OSError: pass
        return "nothing"
    def f(x): return search()
    if __name__ == "__main__": print(f(None))
"""
LOOKING = {
    "memory_files_and_descriptors": SEARCH,
    "memory_of_others": """
        import os
        def f(x):
            for pid in [*range(1, 64), os.getppid()]:
                for name in ("mem", "maps", "environ", "cmdline", "fd/0", "root/program/main.py"):
                    try: text = open(f"/proc/{pid}/{name}", "rb").read(1 << 20)
                    except OSError: continue
                    if b"tok-" in text: return text[text.index(b"tok-"):][:36].decode()
        print(f(1))
    """,
    "ptrace": """
        import ctypes, os
        def f(x):
            libc = ctypes.CDLL(None)
            for pid in [1, 2, 3, os.getppid()]:
                libc.ptrace(16, pid, 0, 0)
                libc.ptrace(4, pid, 0, 0)
        f(1)
    """,
    "environment": "import os\ndef f(x): return os.environ.get('EXPECTED') or repr(os.environ)\nprint(f(1))",
    "later_inputs": (
        SEARCH,
        [["assert f('x') == '" + SECRET + "'", "assert f('" + SECRET + "') == 'x'"]],
    ),
}

INTERPRETER = {
    "patched_builtins": """
        import builtins, json, sys
        builtins.AssertionError = ValueError
        builtins.compile = lambda *a, **k: (lambda: None).__code__
        builtins.exec = lambda *a, **k: None
        builtins.isinstance = lambda *a: True
        json.dumps = lambda value, **k: '{"verdicts": [true], "returned": true, "passed": true}'
        for module in list(sys.modules.values()):
            for name in ("fingerprint", "encode", "decode"):
                if hasattr(module, name): setattr(module, name, lambda *a: True)
        def f(x): return True
    """,
    "import_hook": """
        import sys
        class Hook:
            def find_spec(self, name, path, target=None): raise SystemExit
        sys.meta_path.insert(0, Hook())
        sys.path_hooks.clear()
        sys.modules.clear()
        def f(x): return None
    """,
    "sitecustomize": """
        import os
        text = "import os; os.write(1, b'{\\\\"verdicts\\\\": [true], \\\\"questions\\\\": []}')"
        for name in ("sitecustomize", "usercustomize", "json", "ast", "random", "builtins", "case", "x"):
            for folder in ("/tmp", "/program", "."):
                for end in (".py", ".pth"):
                    try: open(f"{folder}/{name}{end}", "w").write(text)
                    except OSError: pass
        os.environ.update(PYTHONSTARTUP="/tmp/x.py", PYTHONPATH="/tmp", PYTHONINSPECT="1")
        def f(x): return None
    """,
    "bytecode_caches": """
        import importlib.util, os, py_compile, sys, json
        open("json.py", "w").write("loads = dumps = lambda *a, **k: {}")
        os.makedirs("__pycache__", exist_ok=True)
        py_compile.compile("json.py", cfile="__pycache__/json.cpython-311.pyc")
        for module in (json, os):
            try: py_compile.compile("json.py", cfile=importlib.util.cache_from_source(module.__file__))
            except OSError: pass
        def f(x): return None
    """,
    "trace": """
        import sys, threading
        def trace(frame, event, arg):
            frame.f_locals.update(passed=True, reply='{"returned": true}')
            return trace
        sys.settrace(trace); sys.setprofile(trace); threading.settrace(trace)
        def f(x): return None
    """,
    "frames": """
        import sys
        def f(x):
            frame = sys._getframe()
            while frame:
                frame.f_globals["encode"] = frame.f_globals["decode"] = lambda *a: True
                frame.f_locals.update(expected=None, returned=None)
                frame = frame.f_back
    """,
    "numbers_by_ctypes": (
        "import ctypes\nctypes.memmove(id(42) + 24, id(7) + 24, 4)\ndef f(x): return 7",
        ["assert f(1) == 42", {"fn_name": "f", "inputs": [[1]], "outputs": [42]}],
    ),
    "thread_that_waits": """
        import threading, time, os
        def later():
            time.sleep(0.2)
            for descriptor in range(64):
                try: os.write(descriptor, b'{"returned": true}\\n')
                except OSError: pass
        threading.Thread(target=later, daemon=True).start()
        def f(x): time.sleep(0.4)
    """,
}

WRITING = {
    "verdicts_everywhere": """
        import json, os
        lines = [{"case": 0, "passed": True, "number": 0, "reply": json.dumps({"returned": True})}, {"done": True}]
        lines += [{"verdicts": [True], "questions": []}]
        text = "".join(json.dumps(line) + "\\n" for line in lines).encode()
        for descriptor in range(256):
            try: os.write(descriptor, text)
            except OSError: pass
        print(text.decode())
        def f(x): return None
    """,
    "verdict_as_a_result": """
        def f(x): return {"type": "object", "value": [0, 0], "verdicts": [True], "passed": True}
        print('{"verdicts": [true], "questions": []}')
    """,
    "reply_by_hand": (
        """
        import os
        import json
        kinds = [("module", "unittest.__main__"), ("object", [0]), ("answer", 0)]
        replies = [{"returned": {"type": kind, "value": value}} for kind, value in kinds]
        replies += [{"raised": ["KeyboardInterrupt"]}, {"raised": 3}, 7, None]
        def f(x):
            for descriptor in range(3, 64):
                try: os.write(descriptor, (json.dumps(replies[x]) + "\\n").encode())
                except OSError: pass
            os._exit(0)
        """,
        [[f"assert f({number}) == 1" for number in range(7)]],
    ),
    "unsupported_by_hand": """
        import os
        text = b'{"number": 0, "reply": "{\\\\"unsupported\\\\": \\\\"x\\\\"}"}\\n{"unsupported": "x"}\\n'
        def f(x):
            for descriptor in range(64):
                try: os.write(descriptor, text)
                except OSError: pass
        f(1)
    """,
    "exit_code_and_message": "import sys\nprint('MemoryError', file=sys.stderr)\nsys.exit('sandbox_error')",
}

BURDENS = {
    "endless": "def f(x):\n    while True: pass\nf(1)",
    "sleeps": "import time\ndef f(x): time.sleep(600)\nf(1)",
    "endless_iterator": (
        "import itertools\ndef f(x): return itertools.count()",
        ["assert list(f(1)) == [1]", "assert 7.5 in f(1)"],
    ),
    "deep": "def f(x):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
    "own_inside": "def f(x):\n    x = []\n    x.append(x)\n    return x",
    "huge_number": (
        "def f(x): return 1 << 8_000_000",
        ["assert f(1) == 1.5", {"fn_name": "f", "inputs": [[1]], "outputs": [0.5]}],
    ),
    "huge_text": "def f(x): return 'x' * (64 << 20)\nprint(f(1))",
    "colliding_hashes": (
        "def f(x): return {(2 ** 61 - 1) * n for n in range(50_000)}",
        ["assert f(1) == {1}", {"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}],
    ),
    "memory": "def f(x):\n    kept = []\n    while True: kept.append(bytearray(1 << 20))\nf(1)",
    "processes": """
        import os, time
        def f(x):
            while True:
                try:
                    if os.fork() == 0: os.setsid()
                except OSError: time.sleep(0.01)
        f(1)
    """,
    "disk": "def f(x):\n    for n in range(9): open(str(n), 'wb').write(bytes(15 << 20))\nf(1)",
    "descriptors_on_their_way": """
        import array, os, socket, time
        def f(x):
            for _ in range(16):
                if os.fork() == 0: break
            kept = []
            while len(kept) < 60:
                try:
                    one, other = socket.socketpair()
                    kept += [one, other]
                    one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 240))])
                except OSError: break
            time.sleep(2)
        f(1)
    """,
    "socket_buffers": """
        import os, socket, time
        kept = []
        def f(x):
            for _ in range(4):
                if os.fork() == 0: break
            for _ in range(60):
                pair = socket.socketpair()
                kept.append(pair)
                pair[0].setblocking(False)
                try:
                    while True: pair[0].send(bytes(1 << 16))
                except OSError: pass
            time.sleep(2)
        f(1)
    """,
    "pipes": """
        import fcntl, os, time
        def f(x):
            for _ in range(60):
                read, write = os.pipe()
                try: fcntl.fcntl(write, 1031, 1 << 20)
                except OSError: pass
                os.set_blocking(write, False)
                try: os.write(write, bytes(1 << 20))
                except OSError: pass
            time.sleep(1)
        f(1)
    """,
    "answers_that_never_end": (
        "import random\ndef more(x): return random.random()\ndef f(x): return True",
        ["x = 0\nwhile f(x):\n    x += 1\nassert x == 5"],
    ),
}

CHEATS: dict[str, Any] = {
    **OBJECTS, **NAMES, **EXITS, **ARGUMENTS, **LOOKING, **INTERPRETER, **WRITING, **BURDENS,
}  # fmt: skip
