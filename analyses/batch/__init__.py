"""One analysis over many prompts and many models: resumable, on one process, many, or a Ray cluster, into one Parquet file.

:func:`kvlens.analyses.batch.runner.run_batch` is the function, ``kvlens analyse NAME`` and ``python -m analyses NAME`` the
commands (:mod:`kvlens.analyses.batch.script`). From the outside in:

- :mod:`~kvlens.analyses.batch.work` checks what a batch is asked for;
- :mod:`~kvlens.analyses.batch.records` reads the prompts;
- :mod:`~kvlens.analyses.batch.workers` turns them into tables, in one process or many, and replaces a worker that died;
- :mod:`~kvlens.analyses.batch.parts` keeps those tables through a kill at any moment, and joins them into the Parquet file.
"""
