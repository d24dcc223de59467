"""Linux interfaces that Python lacks or that must handle millions of pages.

- `libc`: system calls through ctypes; `limits`: what the machine allows
- `procfs`: processes and mappings in /proc; `holders`: who has a file open; `pipes`
- `pagemap`: which pages exist; `memory`: another process's memory; `scanning`: both in C
- `userfaultfd`: filling another process's missing pages; `ptrace`: stopping its threads
- `filesystem`, `huge_file`, `trusted`, `oom`, `waiting`: single system calls and their checks
"""
