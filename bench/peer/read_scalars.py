"""Prints what TensorBoard reads from the folder of an event file, as JSON: {name: [[step, value], ...]}.

    PYTHON bench/peer/read_scalars.py RUN

PYTHON is a Python that has TensorBoard (see traces.py).
"""
import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
curves = {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
print(json.dumps(curves))
