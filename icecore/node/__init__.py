"""This machine: its checks, and what joins the service to the rest of icecore: repositories,
readings, the calls of a supervisor.
"""
