"""The job itself on virtual cards: the real CUDA torch, allocator and frameworks on stub CUDA libraries that keep the books.

target.py finds the environment, build.py compiles the stubs for its torch, run.py runs the ranks, files.py says where their writes go,
inside/ is what runs beside the user's script in each of them, record.py is what comes back. This is the only room that runs the user's
code, and only `rehearse` enters it.
"""
