"""Capture: freeze, scan, stage and upload a process tree; whatever fails, the job runs on."""
