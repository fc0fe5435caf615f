//! SlateDB over the cache of objects: only tests.
