"""Candidates timed in turns, as foci/measure/interleaved.h does it: peer, foci, peer, foci, …"""
import gc
import statistics
import time

# Threads that spin after their work (OpenMP's for milliseconds) would take a core from the next
# candidate: each waits until they sleep.
REST = 0.008
# A call of this many seconds does not notice what a warm-up would bring.
LONG = 0.1
SAMPLE = 0.01


def quantile(values, q):
    values = sorted(values)
    return values[round(q * (len(values) - 1))]


def quartiles(values):
    """(median, lower, upper)."""
    return tuple(quantile(values, q) for q in (0.5, 0.25, 0.75))


class Timings:
    """Seconds a call by candidate, round by round."""

    def __init__(self, names):
        self.seconds = {name: [] for name in names}

    def median(self, name):
        return statistics.median(self.seconds[name])

    def ratio(self, peer, own):
        """The peer's time over ours, round by round: median and quartiles."""
        return quartiles([a / b for a, b in zip(self.seconds[peer], self.seconds[own])])

    def microseconds(self, name):
        """Of a call: median and quartiles."""
        return quartiles([1e6 * t for t in self.seconds[name]])


def interleaved(candidates, seconds, clock=time.perf_counter, least_rounds=5):
    """candidates: {name: callable}. Rounds until `seconds` were measured, `least_rounds` at least
    (three where one round takes longer than that)."""
    def time_of(call, calls):
        begin = clock()
        for _ in range(calls):
            call()
        return (clock() - begin) / calls

    once = {}
    for name, call in candidates.items():
        once[name] = time_of(call, 1)
        if once[name] < LONG:
            once[name] = time_of(call, 1)
    calls = {name: max(1, min(1_000_000, int(SAMPLE / max(1e-9, t)))) for name, t in once.items()}
    timings, spent, rounds = Timings(candidates), 0.0, 0
    if sum(once.values()) > seconds:
        least_rounds = min(least_rounds, 3)
    collecting = gc.isenabled()
    gc.disable()
    try:
        while rounds < least_rounds or spent < seconds:
            for name, call in candidates.items():
                time.sleep(REST)
                if once[name] < LONG:
                    call()
                timings.seconds[name].append(time_of(call, calls[name]))
                spent += timings.seconds[name][-1] * calls[name]
            rounds += 1
    finally:
        if collecting:
            gc.enable()
    return timings
