"""Sentences of different lengths, packed into one row without padding.

Every one attends to itself alone, and gets the bits that it gets in a call of its own.

    python examples/python/packed_batch.py
"""

import numpy as np

import foci


def main() -> None:
    rng = np.random.default_rng(0)
    lengths = [5, 90, 17, 33]
    total, longest = sum(lengths), max(lengths)
    q, k, v = (rng.standard_normal((1, 4, total, 16), dtype=np.float32) for _ in range(3))
    segments = np.repeat(np.arange(len(lengths)), lengths)[None]  # [1, N]: 0 0 0 0 0 1 1 ...

    packed = foci.attention(q, k, v, causal=True, q_segments=segments, k_segments=segments)

    start, equal = 0, 0
    for length in lengths:
        own = slice(start, start + length)
        alone = foci.attention(q[:, :, own], k[:, :, own], v[:, :, own], causal=True)
        equal += np.array_equal(packed[:, :, own], alone)
        start += length
    padded = len(lengths) * longest
    print(f"{len(lengths)} sequences of {lengths} tokens in one row of {total}; "
          f"a padded batch would hold {padded} ({1 - total / padded:.0%} of it padding)")
    print(f"equal to a call of their own, bit for bit: {equal} of {len(lengths)}")


if __name__ == "__main__":
    main()
