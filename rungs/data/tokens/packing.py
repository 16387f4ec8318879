"""Which documents share a sequence: functions of their sizes and a sequence's length. They return
all pieces, sequence by sequence, and each sequence's first place among them, then their number.

Axes: P documents or pieces of them."""

import numpy as np


def in_order(sizes_P: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Take pieces in file order while they fit."""
    totals_P, firsts = np.cumsum(sizes_P), [0]
    while (first := firsts[-1]) < len(sizes_P):
        before = totals_P[first - 1] if first else 0
        end = int(np.searchsorted(totals_P, before + length, side="right"))
        firsts.append(max(end, first + 1))
    return np.arange(len(sizes_P)), np.array(firsts)


def best_fit(sizes_P: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing (Ding et al. 2024): each piece, the longest first, goes where the least
    room is left. Sequences, by their first pieces, and the pieces of each are in file order."""
    rows_by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0  # its bit r tells whether a row has room for r tokens
    row_P, rows = np.empty(len(sizes_P), np.int64), 0
    for piece in np.argsort(-sizes_P, kind="stable").tolist():
        size = min(int(sizes_P[piece]), length)  # the loader refuses longer pairs
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            rooms ^= 0 if rows_by_room[room] else 1 << room
        else:
            room, row, rows = length, rows, rows + 1
        row_P[piece] = row
        rows_by_room[room - size].append(row)
        rooms |= 1 << (room - size)
    _, first_piece = np.unique(row_P, return_index=True)
    row_P = np.argsort(np.argsort(first_piece))[row_P]
    firsts = np.concatenate([[0], np.cumsum(np.bincount(row_P, minlength=rows))])
    return np.argsort(row_P, kind="stable"), firsts
