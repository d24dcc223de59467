"""Real programs that check their own data, for round trips through snapshot and restore; none knows
of icecore.
"""
