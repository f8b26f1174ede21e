"""One driver, many worker processes: call a method of a whole group as if it were one object.

`base` holds what needs no cluster (workers, dispatch modes, the group's interface); `ray` runs it on Ray. This layer
moves `DataProto`s and knows nothing of what the workers compute.
"""
