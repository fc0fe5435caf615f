"""Arrays and files larger than memory, read through a page cache with a hard bound.

>>> import bifolio, numpy as np
>>> cache = bifolio.Cache("256 MiB")
>>> np.save(path, np.arange(1_000_000, dtype="i8").reshape(-1, 10))
>>> a = cache.open_array(path)
>>> a.shape, a.dtype
((100000, 10), dtype('int64'))
>>> a[[5, 70_000, 3]][:, 0]
array([    50, 700000,     30])
>>> a[-1, ::3]
array([999990, 999993, 999996, 999999])
>>> cache.close()

Errors of files are `OSError` with `errno` and `filename`; a closed cache, file or array raises
`ValueError`, as Python's files do.
"""

from ._array import Array, Chunks
from ._cache import Cache
from ._file import File
from ._sizes import divide, format_size, parse_size
from ._stats import Stats

__all__ = ["Array", "Cache", "Chunks", "File", "Stats", "divide", "format_size", "parse_size"]
