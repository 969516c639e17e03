"""Is NEW.py the same function as MODEL.py? docs/verification.md says what "the same" means.

Read in this order:

- `answer.py`     two files → the answer as a dict; the files run in a process of their own
- `families.py`   the cases: weights, statistics and inputs, for any model
- `schedule.py`   which of them run for this model on this device
- `golden.py`     a case → what is right (float64), and how far rounding may lead away from it
- `rounding.py`   rounding errors made on purpose, in float64
- `outputs.py`    what a forward returns, taken apart
- `process.py`    settings of the process, and which a call has left changed
- `trial.py`      one run of a model, original or candidate, in the way that a case uses it
- `conventions.py` what a program finds of a module besides its values
- `runner.py`     the candidate's side: its calls, in a process that holds nothing of the judge's
- `candidate.py`  the judge's side: what is sent, what is compared, which side effects are faults
- `reported.py`  what is reported and not demanded: its uses, and warnings in words
- `equality.py`   comparing one tensor: the measures and the limits
- `faults.py`     a failed case → the fault's name
- `reading.py`    what a source does that no model needs
- `judging.py`    all comparisons → a verdict, in a sentence
"""

from .answer import check_files, verify
from .faults import FAULTS
from .judging import judge
from .schedule import Effort, references

__all__ = ["FAULTS", "Effort", "check_files", "judge", "references", "verify"]
