"""Right programs of all styles in which datasets test code: name, program, ground truth."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

RIGHT: dict[str, tuple[str, Any]] = {
    "stdin": (
        """
        a, b = map(int, input().split())
        print(a + b)
        """,
        {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]},
    ),
    "call": (
        "def add(a, b): return a + b",
        {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]},
    ),
    "leetcode": (
        """
        class Solution:
            def two(self, n: List[int]) -> Optional[int]: return sum(n)
        """,
        {"fn_name": "two", "inputs": [[[1, 2]]], "outputs": [3]},
    ),
    "mbpp": (
        "def f(x): return x + 1",
        ["assert f(1) == 2", "assert f(2) == 3", "assert f(-1) == 0"],
    ),
    "mbpp_capital": (
        "def Find_Max(x): return max(x)",
        ["assert Find_Max([1, 2]) == 2", "assert Find_Max([[1], [3]]) == [3]"],
    ),
    "mbpp_setup": (
        "def f(x): return x",
        ["import math", "assert f(math.pi) == math.pi"],
    ),
    "humaneval": (
        "def f(x, y=1): return x * y",
        """
        METADATA = {}


        def check(candidate):
            assert candidate(1) == 1
            assert candidate(2, y=3) == 6
            assert candidate(1.5) == candidate(1.5)

        check(f)
        """,
    ),
    "humaneval_random": (
        """
        def encode(s): return s[::-1]
        def decode(s): return s[::-1]
        """,
        {
            "fn_name": ["encode", "decode"],
            "asserts": """
            from random import choice
            import string
            def check(candidate):
                for _ in range(20):
                    s = ''.join(choice(string.ascii_lowercase) for _ in range(9))
                    e = encode(s)
                    assert candidate(e) == s
                    assert e == s[::-1]
            check(decode)
            """,
        },
    ),
    "leetcode_assert": (
        """
        class Solution:
            def f(self, x): return x
        """,
        """
        s = Solution()
        assert s.f(1) == 1
        assert Solution().f([2]) == [2]
        """,
    ),
    "close": (
        "def f(x): return x / 3",
        """
        assert math.isclose(f(1), 1 / 3)
        assert abs(f(2) - 0.667) < 1e-2
        assert isclose(f(3), 1.0)
        """,
    ),
    "counter": (
        "def f(x): return list(x)[::-1]",
        "assert Counter(f('aab')) == Counter('aab')",
    ),
    "in_place": (
        "def f(x): x.sort()",
        """
        a = [3, 1, 2]
        f(a)
        assert a == [1, 2, 3]
        assert a[0] == 1
        """,
    ),
    "in_place_nested": (
        "def f(m): m[:] = [list(r) for r in zip(*m)]",
        """
        def check(g):
            m = [[1, 2], [3, 4]]
            g(m)
            assert m == [[1, 3], [2, 4]]
        check(f)
        """,
    ),
    "in_place_dict": (
        "def f(d): d['k'] = {1, 2}",
        """
        a = {}
        f(a)
        assert a == {'k': {1, 2}}
        """,
    ),
    "own_arguments": (
        """
        def f(x):
            x.sort()
            return x
        """,
        """
        x = [3, 1, 2]
        assert f(x) == sorted(x)
        assert x == [3, 1, 2] and f(x)[0] == 1
        """,
    ),
    "generator": (
        """
        def f(n):
            for i in range(n): yield i * i
        """,
        """
        assert list(f(3)) == [0, 1, 4]
        assert next(f(1)) == 0
        assert sum(f(4)) == 14
        """,
    ),
    "endless_generator": (
        """
        def f():
            n = 0
            while True:
                yield n
                n += 1
        """,
        """
        g = f()
        assert [next(g) for _ in range(3)] == [0, 1, 2]
        """,
    ),
    "raises": (
        """
        class E(ValueError): pass
        def f(x):
            if x < 0: raise E(x)
            return x
        """,
        """
        try:
            f(-1)
            assert False
        except ValueError:
            pass
        assert f(1) == 1
        """,
    ),
    "all_map": (
        "def f(x): return x % 2 == 0",
        """
        assert all(map(f, [2, 4]))
        assert not any(map(f, [1, 3]))
        assert f(2) is True
        """,
    ),
    "chain": (
        "def f(x): return 2 * x",
        """
        x = 1
        for _ in range(50):
            x = f(x)
        assert x == 2 ** 50
        """,
    ),
    "dependent": (
        "def f(x): return x + 1",
        """
        x = 0
        while x < 5:
            x = f(x) + 0
        assert x == 5
        """,
    ),
    "types": (
        "def f(): return {(1, 2): b'x', 3: 1j, None: {1}}, range(3), frozenset('a')",
        "assert f() == ({(1, 2): b'x', 3: 1j, None: {1}}, range(3), frozenset('a'))",
    ),
    "library_types": (
        """
        from fractions import Fraction
        from decimal import Decimal
        from collections import deque, OrderedDict
        def f(x): return [Fraction(x), Decimal(x), deque([x]), OrderedDict(a=x)]
        """,
        """
        from fractions import Fraction
        assert f(1) == [Fraction(1), 1, deque([1]), {'a': 1}]
        assert f(2)[0] / 4 == Fraction(1, 2)
        """,
    ),
    "huge": (
        """
        import math
        def f(n): return math.factorial(n)
        """,
        """
        import math
        assert f(500) == math.factorial(500)
        assert len(str(f(3000))) == 9131
        """,
    ),
    "class": (
        """
        class Stack:
            def __init__(self, *items): self.items = list(items)
            def push(self, x): self.items.append(x)
            def pop(self): return self.items.pop()
            def __len__(self): return len(self.items)
            def __iter__(self): return iter(self.items)
            def __str__(self): return f'Stack{self.items}'
            def __getitem__(self, n): return self.items[n]
        """,
        """
        s = Stack()
        s.push(1)
        s.push(2)
        assert s.pop() == 2
        assert s.items == [1]
        assert len(s) == 1
        try:
            s.pop(); s.pop()
            assert False
        except IndexError:
            pass
        """,
    ),
    "class_protocols": (
        """
        class Stack:
            def __init__(self, *items): self.items = list(items)
            def push(self, x): self.items.append(x)
            def pop(self): return self.items.pop()
            def __len__(self): return len(self.items)
            def __iter__(self): return iter(self.items)
            def __str__(self): return f'Stack{self.items}'
            def __getitem__(self, n): return self.items[n]
        """,
        """
        s = Stack(1, 2)
        assert list(s) == [1, 2]
        assert str(s) == 'Stack[1, 2]'
        assert s[1] == 2 and 2 in s
        assert [x * 2 for x in s] == [2, 4]
        """,
    ),
    "linked_list": (
        """
        class Node:
            def __init__(self, value, next=None): self.value, self.next = value, next
        def total(node):
            sum = 0
            while node: sum, node = sum + node.value, node.next
            return sum
        def turned(node):
            last = None
            while node: node.next, last, node = last, node, node.next
            return last
        """,
        """
        head = Node(1, Node(2))
        head.next.next = Node(3)
        assert total(head) == 6
        assert turned(head).value == 3
        """,
    ),
    "pairs": (
        """
        class Pair:
            def __init__(s, a, b): s.a, s.b = a, b
        def longest(ps, n): return max(p.b for p in ps)
        """,
        "assert longest([Pair(5, 24), Pair(15, 25)], 2) == 25",
    ),
    "closure": (
        "def adder(n): return lambda x: x + n",
        "assert adder(3)(4) == 7",
    ),
    "state": (
        """
        n = 0
        def count():
            global n
            n += 1
            return n
        """,
        """
        assert count() == 1
        assert count() == 2
        """,
    ),
    "prints": (
        """
        def f(x):
            print('debug', x)
            return x
        """,
        """
        print('test')
        assert f(1) == 1
        """,
    ),
    "asyncio": (
        """
        import asyncio
        async def g(x): return x
        def f(x): return asyncio.run(g(x))
        """,
        "assert f(1) == 1",
    ),
    "surrogates": (
        "def f(x): return x + '\\ud800'",
        "assert f('\\udfff') == '\\udfff\\ud800'",
    ),
    "odd_floats": (
        "def f(x): return x",
        """
        import math
        assert math.isnan(f(math.nan))
        assert f(math.inf) == math.inf
        assert math.copysign(1, f(-0.0)) == -1
        """,
    ),
}


def unindented(value: Any) -> Any:
    """The same with its texts at the left margin."""
    if isinstance(value, dict):
        return {key: unindented(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(unindented, value))
    return dedent(value) if isinstance(value, str) else value
