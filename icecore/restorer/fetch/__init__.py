"""Fetches cells from the store and hands them, verified, to whatever puts them in place.

In reading order: `sink` is the contract of what takes cells, `limits` what fetching may use,
`schedule` decides which rows come next, `source` reads and decodes them, `ahead` keeps ranges in
flight where storage is far away, and `fetcher` runs the workers. `spans` keeps placers busy that
fill the file of device memory.
"""
