"""Fill cells of one row, in a process of its own: one line of JSON when a cell begins and ends.

python compat/worker.py gpt2 fit audit
"""

import json
import os
import sys
import time
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import catalogue
import keras
import looking
import training
from runs import KerasCannotError, eager_by_keras, said

# Each column with what shows that plain Keras cannot do it either.
COLUMNS = {
    "fit": (training.fit, None),
    "convert": (training.convert, training.convert_by_keras),
    "file": (training.file, training.file_by_keras),
    "audit": (looking.audit, None),
    "locate_nonfinite": (looking.locate_nonfinite, eager_by_keras),
    "compare_precisions": (looking.compare_precisions, eager_by_keras),
    "diagnose": (looking.diagnose, looking.diagnose_by_keras),
    "memory_report": (looking.memory_report, eager_by_keras),
    "quantize_aware": (training.quantize_aware, training.fit_by_keras),
}
# What JAX says on CPUs of attention in float16, also where Keras leaves that layer in float32.
CPU_CANNOT = "is not supported by dot_general on CPU"


def cell(name: str, column: str) -> tuple[str, str]:
    """What a cell says: works, Keras cannot or kmp cannot; and how, or why."""
    function, by_keras = COLUMNS[column]
    backends = catalogue.program(name).backends
    if keras.backend.backend() not in backends:
        return "Keras cannot", f"its own train_step is written for {', '.join(backends)}"
    try:
        return "works", function(catalogue.program(name))
    except KerasCannotError as error:
        return "Keras cannot", str(error)
    except Exception as error:
        traceback.print_exc()
        reason = said(error)
    if CPU_CANNOT in reason:
        return "Keras cannot", reason
    if by_keras is not None:
        try:
            by_keras(catalogue.program(name))
        except Exception as error:
            return "Keras cannot", said(error)
    return "kmp cannot", reason


def main(name: str, *columns: str) -> None:
    """Fill the cells one after the other."""
    for column in columns:
        print(json.dumps({"begins": column}), flush=True)
        start = time.time()
        state, text = cell(name, column)
        result = {"state": state, "text": text, "seconds": round(time.time() - start, 1)}
        print(json.dumps({"column": column, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
