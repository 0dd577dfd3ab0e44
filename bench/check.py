"""`./run bench --check`: runs all benchmarks whose rows have targets, and says which fall short.

A row that falls short is listed; it is no error. What broke is one: a benchmark that ended badly or
wrote no results, results of foci and a peer that differ, a row with a target that nobody measured.
Exit code 0, 1 if something broke, 2 for what it cannot take.
"""
import argparse
import json
import os
import re
import subprocess
import sys

import rows

BENCH = os.path.dirname(os.path.abspath(__file__))
PAGE = os.path.join(os.path.dirname(BENCH), "docs", "performance.md")
# Sections of rows.json that a program of the same name measures.
PROGRAMS = ("attention", "ratios", "decode", "memory", "scaling")
# And those that the peers' runner measures.
SECTIONS_OF_PEERS = ("sparse", "training", "python", "models")
# How measures of theirs end that the peers' runner takes too.
PEERS = tuple(f" {name} / foci" for name in
              ("PyTorch", "ONNX Runtime", "FlexAttention", "entmax package"))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"check: {message}; --help says what there is\n")


def regular_expression(text):
    try:
        re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"'{text}' is no regular expression: {e}") from None
    return text


def options(words):
    p = Parser(prog="./run bench --check", allow_abbrev=False,
               description=__doc__.split("\n", 1)[0])
    p.add_argument("--quick", action="store_true", help="shorter measurements, without slow rows")
    p.add_argument("--rows", metavar="REGEX", type=regular_expression,
                   help="only rows whose name has a match")
    p.add_argument("--threads", metavar="N", type=int, help="default: all there are")
    p.add_argument("--json", metavar="FILE", help="all results as JSON")
    p.add_argument("--markdown", action="store_true",
                   help="write the table of this SIMD target into docs/performance.md")
    p.add_argument("--no-peers", action="store_true", help="only foci's own programs")
    p.add_argument("--build", metavar="FOLDER", required=True, help=argparse.SUPPRESS)
    p.add_argument("--peers-python", metavar="FILE", default=sys.executable,
                   help=argparse.SUPPRESS)
    p.add_argument("--parse-only", action="store_true", help=argparse.SUPPRESS)
    o = p.parse_args(words)
    if o.threads is not None and not 1 <= o.threads <= 1024:
        p.error(f"--threads: {o.threads}, must be 1 to 1024")
    if o.markdown and (o.rows or o.no_peers):
        p.error("--markdown writes a whole table: it goes with neither --rows nor --no-peers")
    return o


def commands(o):
    """(name, command, where it writes its results) of every benchmark."""
    common = ["--quick"] * o.quick
    if o.rows:
        common += ["--rows", o.rows]
    if o.threads:
        common += ["--threads", str(o.threads)]
    list_ = [(name, [os.path.join(o.build, "bin", f"{name}_bench")]) for name in PROGRAMS]
    if not o.no_peers:
        list_.append(("peers", [o.peers_python, "-B", os.path.join(BENCH, "peers", "run.py"),
                                "--build", o.build]))
    for name, command in list_:
        path = os.path.join(o.build, "bench", f"{name}.json")
        yield name, command + common + ["--json", path], path


def run_all(o):
    """(results by benchmark, what broke in lines)."""
    os.makedirs(os.path.join(o.build, "bench"), exist_ok=True)
    results, broken = {}, []
    for name, command, path in commands(o):
        if os.path.exists(path):
            os.remove(path)
        print(f"check: {name}", file=sys.stderr, flush=True)
        try:
            code = subprocess.run(command, check=False).returncode
        except OSError as e:
            broken.append(f"{name}: could not be started: {e}")
            continue
        if code:
            broken.append(f"{name}: ended with exit code {code}; what it said stands above")
        if code == 0 or os.path.exists(path):
            try:
                results[name] = rows.read_results(path)
            except rows.Broken as e:
                broken.append(f"{name}: {e}")
    return results, broken


def unmeasured(o, results):
    """Rows with a target of which no benchmark that ran says anything."""
    simds = {r["simd"] for r in results.values()}
    said = {(row["row"], row["measure"]) for r in results.values() for row in r["rows"]}
    for section, definitions in rows.read_list().items():
        if section == "about":
            continue
        for d in definitions:
            if (o.quick and d.get("slow")) or (o.rows and not re.search(o.rows, d["row"])):
                continue
            for measure in d.get("targets", {}):
                own = section not in SECTIONS_OF_PEERS and not measure.endswith(PEERS)
                bench = section if own else "peers"
                if bench in results and (d["row"], measure) not in said and any(
                        rows.target_of(d, measure, simd) for simd in simds):
                    yield f"{bench}: nothing about {d['row']}, {measure}"


def say_what_targets_ask(results):
    """Gives rows that fall short of a peer `asks`: the share of peak that their target comes to.

    A peer's time over foci's is foci's share over the peer's; so the target, of this peer's share,
    is a share too, and near 100 % it is out of reach.
    """
    shares = {(row["row"], row["measure"].split()[0]): row["value"]
              for row in results.get("attention", {"rows": []})["rows"]
              if row["measure"].endswith(" of peak")}
    for row in results.get("peers", {"rows": []})["rows"]:
        share = shares.get((row["row"], row["measure"].split()[0]))
        if row["met"] is False and share and "at_least" in row["target"]:
            asked = 100 * share * row["target"]["at_least"] / row["value"]
            row["asks"] = f"asks {asked:.0f} % of peak"


def summary(results, broken):
    """The lines that --check ends with."""
    all_rows = [row for r in results.values() for row in r["rows"]]
    aimed = [row for row in all_rows if row["target"] is not None]
    short = [row for row in aimed if not row["met"]]
    lines = [f"{len(aimed)} rows with targets, {len(short)} fall short"]
    for row in short:
        lines.append(f"  {row['row']:<38}{row['measure']:<34}{target_text(row):<17}reached "
                     f"{rows.value_text(row)}" + (f", {row['asks']}" if "asks" in row else ""))
    for what in broken:
        lines.append(f"broke: {what}")
    return lines


def target_text(row):
    return rows.target_text(row["target"])


def processor():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            for text in f:
                if text.startswith("model name"):
                    return text.split(":", 1)[1].strip()
    except OSError:
        pass
    return "unknown processor"


def markdown(results):
    """The tables of one run, in the order of the benchmarks."""
    any_one = next(iter(results.values()))
    facts = {k: v for r in results.values() for k, v in r["facts"].items()}
    head = (f"{processor()}, SIMD target {any_one['simd']}, {any_one['threads']} threads"
            + (f", multiply-add peak {facts['peak_gflops']:.0f} GF/s" if "peak_gflops" in facts
               else "")
            + (", `--quick`" if any_one["quick"] else "") + ".")
    versions = ", ".join(f"{k} {v}" for k, v in facts.items() if isinstance(v, str))
    lines = [head + (f" Peers: {versions}." if versions else "")]
    for name, r in results.items():
        listed = [row for row in r["rows"] if " ms, N " not in row["measure"]]
        if not listed:
            continue
        lines += ["", f"`{name}`", "", "| row | measure | median (quartiles) | target | |",
                  "|---|---|---|---|---|"]
        for row in listed:
            mark = {None: "", True: "met", False: "**short**"}[row["met"]]
            mark += f", {row['asks']}" if "asks" in row else ""
            told = name != "peers" or " is wrong " in row["note"]
            note = f"; {row['note']}" if row["note"] and told else ""
            lines.append(f"| {row['row']} | {row['measure']} | {rows.value_text(row)}{note} | "
                         f"{rows.target_text(row['target'])} | {mark} |")
    return "\n".join(lines)


def rewrite(page, simd, table):
    """The page with the table between the markers of this SIMD target."""
    begin, end = f"<!-- measured {simd}: begin -->", f"<!-- measured {simd}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise rows.Broken(f"docs/performance.md: must have '{begin}' and '{end}' once each")
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{table}\n{end}{after}"


def main(words):
    o = options(words)
    if o.parse_only:
        return 0
    results, broken = run_all(o)
    broken += unmeasured(o, results)
    say_what_targets_ask(results)
    print("\n".join(summary(results, broken)))
    try:
        if o.json:
            with open(o.json, "w", encoding="utf-8") as f:
                json.dump({"processor": processor(), "benches": results, "broken": broken}, f,
                          indent=2)
        if o.markdown:
            if broken:
                raise rows.Broken("docs/performance.md stays as it is, since something broke")
            simd = next(iter(results.values()))["simd"]
            with open(PAGE, encoding="utf-8") as f:
                page = rewrite(f.read(), simd, markdown(results))
            with open(PAGE, "w", encoding="utf-8") as f:
                f.write(page)
            print(f"docs/performance.md: the table of {simd} is new")
    except (OSError, rows.Broken) as e:
        print(f"check: {e}", file=sys.stderr)
        return 1
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
