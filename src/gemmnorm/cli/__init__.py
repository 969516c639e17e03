"""The command line: `gemmnorm optimize | verify | bench | explain | report | doctor`.

- `main.py`      arguments, exit codes, one function for each command
- `optimize.py`  find, replace, verify, time: everything that the other folders do, in a row
- `explain.py`   plans of a model file, or of sizes alone
- `doctor.py`    what this machine has and lacks
- `report.py`    every result file as tables for a terminal
- `progress.py`  what is being done, on standard error

Nothing imports this folder but `python -m gemmnorm`.
"""
