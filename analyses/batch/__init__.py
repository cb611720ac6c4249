"""One analysis over many prompts and many models: resumable, on one process, many, or a Ray cluster, into one Parquet file.

:func:`kvlens.analyses.batch.runner.run_batch` is the function, ``kvlens analyse NAME`` and ``python -m analyses NAME`` the
commands (:mod:`kvlens.analyses.batch.script`). From the outside in:

- :mod:`~kvlens.analyses.batch.records` reads the prompts;
- :mod:`~kvlens.analyses.batch.engines` distributes them to workers, and reassigns the job of a worker that died;
- :mod:`~kvlens.analyses.batch.worker` runs in each worker: it keeps its model loaded and turns prompts into tables;
- :mod:`~kvlens.analyses.batch.journal` records finished prompts, and survives a kill at any moment;
- :mod:`~kvlens.analyses.batch.table` turns the journal into the Parquet file, one row group per prompt.
"""
