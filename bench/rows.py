"""The list of rows (rows.json) and the one format of results, for the programs in Python.

A result file, as every benchmark writes it with --json:
  {"bench", "simd", "threads", "quick", "facts": {name: number or text}, "rows": [row, …]}
  row: {"row", "measure", "value", "low", "high",
        "target": null or {"at_least" or "at_most": bound}, "met": null, true or false, "note"}
value is a median, low and high its quartiles.
"""
import json
import math
import os
import re

LIST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rows.json")


class Broken(Exception):
    """A list or a result that is not what its format says; one line."""


def parse_target(target, where):
    """("at_least" or "at_most", bound), bound a number or {SIMD target: number}."""
    if not isinstance(target, dict) or len(target) != 1 or not set(target) <= {"at_least",
                                                                              "at_most"}:
        raise Broken(f"{where}: target {target!r}, must be one of at_least and at_most")
    (kind, bound), = target.items()
    numbers = bound.values() if isinstance(bound, dict) else [bound]
    if not all(is_number(n) for n in numbers):
        raise Broken(f"{where}: target {target!r}, must hold numbers")
    return kind, bound


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def target_of(definition, measure, simd):
    """{"at_least" or "at_most": number} of this SIMD target, or None."""
    target = definition.get("targets", {}).get(measure)
    if target is None:
        return None
    kind, bound = parse_target(target, definition["row"])
    if isinstance(bound, dict):
        bound = bound.get(simd)
    return None if bound is None else {kind: bound}


def is_met(target, value):
    kind, bound = parse_target(target, "a row")
    return value >= bound if kind == "at_least" else value <= bound


def result(definition, measure, simd, value, low, high, note=""):
    target = target_of(definition, measure, simd)
    return {"row": definition["row"], "measure": measure, "value": value, "low": low, "high": high,
            "target": target, "met": None if target is None else is_met(target, value),
            "note": note}


def read_list(path=LIST):
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError) as e:
        raise Broken(f"{path}: {e}") from None


def definitions(section, quick=False, pattern=None, path=LIST):
    """The rows of a section that the options let through."""
    return [d for d in read_list(path)[section]
            if not (quick and d.get("slow")) and (pattern is None or re.search(pattern, d["row"]))]


def read_results(path):
    """A result file, checked. Raises Broken with one line."""
    try:
        with open(path, encoding="utf-8") as f:
            data = json.load(f)
    except (OSError, ValueError) as e:
        raise Broken(f"{path}: {e}") from None
    if not isinstance(data, dict):
        raise Broken(f"{path}: no object")
    for key, kind in (("bench", str), ("simd", str), ("threads", int), ("quick", bool),
                      ("facts", dict), ("rows", list)):
        if not isinstance(data.get(key), kind):
            raise Broken(f"{path}: {key} is {data.get(key)!r}, must be {kind.__name__}")
    for i, row in enumerate(data["rows"]):
        check_row(row, f"{path}: rows[{i}]")
    return data


def check_row(row, where):
    if not isinstance(row, dict):
        raise Broken(f"{where}: no object")
    for key in ("row", "measure", "note"):
        if not isinstance(row.get(key), str):
            raise Broken(f"{where}.{key}: {row.get(key)!r}, must be text")
    for key in ("value", "low", "high"):
        if not is_number(row.get(key)) or not math.isfinite(row[key]):
            raise Broken(f"{where}.{key}: {row.get(key)!r}, must be a finite number")
    for key in ("target", "met"):
        if key not in row:
            raise Broken(f"{where}.{key} is missing")
    expected = None
    if row["target"] is not None:
        kind, bound = parse_target(row["target"], where)
        if isinstance(bound, dict):
            raise Broken(f"{where}.target: {row['target']!r}, must hold one number")
        expected = is_met({kind: bound}, row["value"])
    if row["met"] is not expected:
        raise Broken(f"{where}.met: {row['met']!r}, the value and the target say {expected!r}")


def target_text(target):
    if target is None:
        return ""
    kind, bound = parse_target(target, "a row")
    return f"{kind.replace('_', ' ')} {bound:g}"


def value_text(row):
    """"1.31 (1.28 - 1.35)"."""
    numbers = [f"{row[key]:.3g}" for key in ("value", "low", "high")]
    if numbers[0] == numbers[1] == numbers[2]:
        return numbers[0]
    return f"{numbers[0]} ({numbers[1]} - {numbers[2]})"


def line(row):
    """A line of the table that all benchmarks print."""
    text = f"{row['row']:<38}{row['measure']:<34}{value_text(row)}"
    if row["target"] is not None:
        text += "  " + target_text(row["target"]) + ("" if row["met"] else ": falls short")
    return text + ("  " + row["note"] if row["note"] else "")
