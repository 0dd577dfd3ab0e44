"""`./run bench peers`: foci beside PyTorch, FlexAttention, ONNX Runtime and the entmax package, and
in a Hugging Face model, on the same inputs and threads, in turns, in this one process.

foci is its Python package (training steps: its library). A row whose results differ by more than
rounding, or that cannot run, is reported and makes the exit code 1.
"""
import argparse
import contextlib
import json
import os
import re
import sys
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import rows as results  # noqa: E402


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"peers: {message}; --help says what there is\n")


def regular_expression(text):
    try:
        return re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"'{text}' is no regular expression: {e}") from None


def read_options(words):
    p = Parser(prog="./run bench peers", allow_abbrev=False,
               description=__doc__.split("\n\n", 1)[0])
    p.add_argument("--quick", action="store_true", help="shorter measurements, without slow rows")
    p.add_argument("--rows", metavar="REGEX", type=regular_expression,
                   help="only rows whose name has a match")
    p.add_argument("--threads", metavar="N", type=int, default=len(os.sched_getaffinity(0)),
                   help="of every candidate; default %(default)s")
    p.add_argument("--json", metavar="FILE", help="the results as JSON too")
    p.add_argument("--build", metavar="FOLDER", required=True, help=argparse.SUPPRESS)
    p.add_argument("--parse-only", action="store_true", help=argparse.SUPPRESS)
    o = p.parse_args(words)
    if not 1 <= o.threads <= 1024:
        p.error(f"--threads: {o.threads}, must be 1 to 1024")
    return o


def hold_back(simd):
    """Where foci is held to a SIMD target, PyTorch is held to the same before it is loaded. (ONNX
    Runtime cannot be.)"""
    if simd == "avx2":
        os.environ.update(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2",
                          MKL_ENABLE_INSTRUCTIONS="AVX2")
    elif simd == "baseline":
        os.environ.update(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41",
                          MKL_ENABLE_INSTRUCTIONS="SSE4_2")


class Run:
    """Options, the library, and rows as they are measured."""

    def __init__(self, options, library):
        import timing
        self.options, self.library, self.threads = options, library, options.threads
        self.timing = timing
        self.simd = library.about().split()[2].rstrip(",")
        self.rows, self.broken = [], []

    def definitions(self, section):
        return results.definitions(section, self.options.quick, self.options.rows)

    def time(self, candidates):
        # One thread is timed by the CPU time of all there are, which a busy machine disturbs least.
        clock = time.process_time if self.threads == 1 else time.perf_counter
        return self.timing.interleaved(candidates, 0.5 if self.options.quick else 2, clock)

    def add(self, definition, measure, ratio, note):
        self.rows.append(results.result(definition, measure, self.simd, *ratio, note))
        print(results.line(self.rows[-1]), flush=True)

    @contextlib.contextmanager
    def row(self, definition, what):
        """A row that fails is told, and the next one begins."""
        try:
            yield
        except Exception as e:  # whatever a peer throws
            said = (str(e) or traceback.format_exc(limit=1)).strip().splitlines()
            self.broken.append(f"{definition['row']}, {what}: {type(e).__name__}: {said[0]}")
            print(f"peers: {self.broken[-1]}", file=sys.stderr, flush=True)


def main(words):
    options = read_options(words)
    if options.parse_only:
        return 0
    hold_back(os.environ.get("FOCI_TARGET"))
    os.environ.update(OMP_NUM_THREADS=str(options.threads))
    import torch
    import foci_library
    import attention_rows
    import call_rows
    import model_rows
    import onnx_peer
    import sparse_rows
    import training_rows
    torch.set_num_threads(options.threads)
    try:
        library = foci_library.Library(options.build)
        library.set_threads(options.threads)
        run = Run(options, library)
    except (OSError, foci_library.FociError) as e:
        print(f"peers: {e}", file=sys.stderr)
        return 1
    facts = {"PyTorch": torch.__version__, **onnx_peer.VERSIONS, **sparse_rows.VERSIONS,
             **model_rows.VERSIONS}
    print(f"peers: {library.about()}; " + ", ".join(f"{k} {v}" for k, v in facts.items()))
    print(f"{'row':<38}{'measure':<34}median (quartiles)")
    attention_rows.rows(run)
    sparse_rows.rows(run)
    attention_rows.decode_rows(run)
    call_rows.rows(run)
    model_rows.rows(run)
    training_rows.rows(run)
    if options.json:
        try:
            with open(options.json, "w", encoding="utf-8") as f:
                json.dump({"bench": "peers", "simd": run.simd, "threads": options.threads,
                           "quick": options.quick, "facts": facts, "rows": run.rows}, f, indent=2)
        except OSError as e:
            print(f"peers: {e}", file=sys.stderr)
            return 1
    for what in run.broken:
        print(f"broke: {what}", file=sys.stderr)
    return 1 if run.broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
