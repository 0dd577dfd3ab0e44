"""The hot inner loops as the compiler left them: their multiply-adds, and no detours by the stack.

usage: disassembly_test.py OBJDUMP LIBRARY

Reads the disassembly of libfoci_kernels.a. An inner loop is a backward jump whose body holds no
other; hot are those of the full tiles in the functions of LOOPS. In these no vector may move to or
from the stack, nor may an address wait in a vector register: each such move takes a multiply-add's
place (measured: 4 % of a matrix product). Tiles for what is left over at an edge are not checked.
"""
import re
import subprocess
import sys
import unittest

OBJDUMP = LIBRARY = ""

# Per target: namespace, then function -> multiply-adds of one step of its full tile. The compiler
# may do several steps in one round. (<false: without the care for NaN and infinity.)
LOOPS = {
    "AVX-512": ("N_AVX3", {"any_tile<12, ": 24, "score_strip": 24, "gather_strip_as<false": 16,
                           "scatter_strips_as<false": 24}),
    "AVX2": ("N_AVX2", {"any_tile<6, ": 12, "score_strip": 12, "gather_strip_as<false": 12,
                        "scatter_strips_as<false": 12}),
}

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*?)\s*$")
MULTIPLY_ADD = re.compile(r"^vfn?m(add|sub)(132|213|231)ps$")
VECTOR = re.compile(r"%[xyz]mm\d+")
GENERAL = re.compile(r"%(r[a-ds0-9]\w*|e[a-ds]\w)\b")


class Function:
    def __init__(self, name):
        self.name = name
        self.code = []  # (address, mnemonic, operands)

    def frame_pointer(self):
        """Whether %rbp stands for the stack here, and is not just another register."""
        return any(m == "mov" and o == "%rsp,%rbp" for _, m, o in self.code)

    def inner_loops(self):
        """Bodies of backward jumps that hold no other backward jump's."""
        places = {address: i for i, (address, _, _) in enumerate(self.code)}
        spans = []
        for i, (_, mnemonic, operands) in enumerate(self.code):
            target = re.match(r"^([0-9a-f]+)\b", operands)
            if mnemonic.startswith("j") and target:
                begin = places.get(int(target.group(1), 16))
                if begin is not None and begin <= i:
                    spans.append((begin, i))
        return [self.code[b:e + 1] for b, e in spans
                if not any((x, y) != (b, e) and b <= x and y <= e for x, y in spans)]


def functions_of(text):
    found = []
    for line in text.splitlines():
        head = FUNCTION.match(line)
        if head:
            found.append(Function(head.group(1)))
            continue
        step = INSTRUCTION.match(line)
        if step and found:
            operands = step.group(3).split("#")[0].split("<")[0].strip()
            found[-1].code.append((int(step.group(1), 16), step.group(2), operands))
    return found


def multiply_adds(body):
    return sum(1 for _, mnemonic, _ in body if MULTIPLY_ADD.match(mnemonic))


def detours(function, body):
    """Instructions of a loop that move vectors to or from the stack, or addresses by vectors."""
    stack = r"\(%(rsp|rbp)\b" if function.frame_pointer() else r"\(%rsp\b"
    found = []
    for address, mnemonic, operands in body:
        vector = VECTOR.search(operands)
        if vector and re.search(stack, operands):
            found.append(f"{address:x}: {mnemonic} {operands}  (the stack)")
        elif mnemonic in ("vmovq", "vmovd") and vector and re.search(
                GENERAL, re.sub(r"\([^)]*\)", "", operands)):
            found.append(f"{address:x}: {mnemonic} {operands}  (an address in a vector register)")
    return found


def problems(functions, namespace, name, step):
    """What is wrong with the hot loops of all functions namespace::name…"""
    wanted = [f for f in functions if f"{namespace}::{name}" in f.name]
    if not wanted:
        return [f"no function {namespace}::{name} in the disassembly"]
    found, counts = [], []
    for function in wanted:
        for body in function.inner_loops():
            count = multiply_adds(body)
            counts.append(count)
            if count and count % step == 0:
                found += [f"{function.name}: {d}" for d in detours(function, body)]
    if not any(count and count % step == 0 for count in counts):
        found.append(f"{namespace}::{name}: no inner loop of {step} multiply-adds a step; "
                     f"there are loops of {sorted(set(counts) - {0})}")
    return found


class Parser(unittest.TestCase):
    """The check itself, on loops that are right and on loops that are not."""

    HEAD = "0000000000000000 <void ns::N_X::f<12, 1>(long)>:\n"
    LOOP = (  # two multiply-adds a step
            "  10:\tvmovups (%rax),%zmm1\n"
            "{extra}"
            "  16:\tvfmadd231ps %zmm1,%zmm4,%zmm3\n"
            "  1c:\tvfmadd231ps 0x40(%rax),%zmm4,%zmm2\n"
            "  22:\tmov    0x68(%rsp),%rcx\n"
            "  27:\tjne    10 <void ns::N_X::f<12, 1>(long)+0x10>\n")

    def check(self, extra="", head="", step=2, name="f<12, "):
        text = self.HEAD + head + self.LOOP.format(extra=extra)
        return problems(functions_of(text), "N_X", name, step)

    def test_a_clean_loop_passes(self):
        self.assertEqual(self.check(), [])
        # Outside of the loop the stack may be used.
        self.assertEqual(self.check(head="   8:\tvmovaps %zmm3,0x100(%rsp)\n"), [])

    def test_a_spill_is_found(self):
        for extra in ("  14:\tvmovaps %zmm3,0x100(%rsp)\n",
                      "  14:\tvmovups 0x40(%rsp),%ymm3\n",
                      "  14:\tvmulps 0x140(%rsp),%zmm4,%zmm5\n",
                      "  14:\tvbroadcastss 0x8(%rsp,%rax,4),%zmm5\n"):
            with self.subTest(extra):
                found = [p for p in self.check(extra) if "the stack" in p]
                self.assertEqual(len(found), 1, found)

    def test_the_frame_pointer_is_the_stack_only_where_it_was_set(self):
        spill = "  14:\tvmovaps -0x700(%rbp),%zmm3\n"
        self.assertEqual(self.check(spill), [])
        self.assertEqual(len(self.check(spill, head="   1:\tmov    %rsp,%rbp\n")), 1)

    def test_an_address_in_a_vector_register_is_found(self):
        self.assertEqual(len(self.check("  14:\tvmovq  %xmm29,%rcx\n")), 1)
        self.assertEqual(len(self.check("  14:\tvmovq  %r8,%xmm29\n")), 1)
        self.assertEqual(self.check("  14:\tvmovq  (%r8),%xmm29\n"), [])

    def test_too_few_multiply_adds_and_missing_functions_are_found(self):
        self.assertEqual(len(self.check(step=3)), 1)
        self.assertEqual(len(self.check(name="g")), 1)
        self.assertEqual(self.check(step=1), [])  # two steps a round

    def test_only_the_innermost_loop_counts(self):
        text = (self.HEAD + "   8:\tvmovaps 0x100(%rsp),%zmm3\n" + self.LOOP.format(extra="") +
                "  30:\tjne    8 <void ns::N_X::f<12, 1>(long)+0x8>\n")
        self.assertEqual(problems(functions_of(text), "N_X", "f<12, ", 2), [])


class Kernels(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        text = subprocess.run([OBJDUMP, "-d", "-C", "--no-show-raw-insn", LIBRARY], check=True,
                              capture_output=True, text=True).stdout
        cls.functions = functions_of(text)

    def check_target(self, target):
        namespace, loops = LOOPS[target]
        if not any(f"{namespace}::" in f.name for f in self.functions):
            self.skipTest(f"the compiler and Highway at hand make no {target} code")
        for name, step in loops.items():
            with self.subTest(name):
                found = problems(self.functions, namespace, name, step)
                self.assertEqual(found, [], "\n".join(found))

    def test_avx512(self):
        self.check_target("AVX-512")

    def test_avx2(self):
        self.check_target("AVX2")


if __name__ == "__main__":
    OBJDUMP, LIBRARY = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1])
