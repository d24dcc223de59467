"""The node service: its routes, who may call them, and the operations that it runs.

`route_table` declares every route; routing, authorisation and the OpenAPI document follow from it.
"""
