"""Programs in chunks: what of a program is run piece by piece, so that less of it is there at once.

axes      along which dimensions an equation can be cut, and what becomes of the pieces
regions   the equations around a large array that are cut together
loops     the program with a region as a loop over chunks
"""
