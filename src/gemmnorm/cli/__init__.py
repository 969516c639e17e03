"""The command line: `gemmnorm optimize | verify | bench | explain | tune | report | doctor`.

- `main.py`      exit codes, one function for each command
- `arguments.py` what each command takes, and what is refused before anything runs
- `optimize.py`  find, replace, verify, time: everything that the other folders do, in a row
- `explain.py`   plans of a model file, or of sizes alone
- `tune.py`      the same, measured on the GPU that is here
- `doctor.py`    what this machine has and lacks
- `variables.py` the environment variables, and what is wrong with those that are set
- `report.py`    every result file as tables for a terminal
- `over_time.py` a result beside older ones, as text
- `tables.py`    tables that keep their figures whole
- `figures.py`   figures of result files as words
- `progress.py`  what is being done, on standard error

The folder `page` makes every result file an HTML page. Nothing imports this folder but `python -m gemmnorm`.
"""
