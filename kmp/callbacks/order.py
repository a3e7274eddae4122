"""The callbacks of a `fit`, and their order."""

import inspect

import keras
from keras.callbacks import CallbackList


def come_first(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Let `callback` be called before all others of its `fit`; for use in `on_train_begin`.

    What it puts into the logs is then there for every other callback, wherever the user has put it
    in the list. Keras does not tell a callback of its list, so that it is looked for among the
    callers. Those after `callback` keep their places, so that the loop that has just called it
    skips none and calls none twice.

    Returns:
        All callbacks of this `fit`; only `callback` if something other than Keras has called it.
    """
    frame = inspect.currentframe()
    while frame := frame and frame.f_back:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackList):
            if callback in caller.callbacks:
                caller.callbacks.remove(callback)
                caller.callbacks.insert(0, callback)
            return list(caller.callbacks)
    return [callback]
