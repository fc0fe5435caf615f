//! The class `Cache`: a bound, its files, its counters.

use std::path::PathBuf;
use std::time::Duration;

use bifolio::OpenOptions;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::exception;
use crate::file::File;

/// A cache with a bound on memory, in bytes.
#[derive(Debug)]
#[pyclass(frozen, module = "bifolio._core")]
pub(crate) struct Cache {
    /// `None` only while it is dropped.
    cache: Option<bifolio::Cache>,
    /// The process that built it.
    process: u32,
}

impl Cache {
    fn get(&self) -> &bifolio::Cache {
        self.cache.as_ref().expect("a cache until it is dropped")
    }
}

/// How a file is opened.
#[derive(Debug, FromPyObject)]
#[pyo3(from_item_all)]
struct Access {
    write: bool,
    create: bool,
    create_new: bool,
    truncate: bool,
}

#[pymethods]
impl Cache {
    #[new]
    fn new(py: Python<'_>, memory: u64, dirty_age_seconds: f64) -> PyResult<Self> {
        let age = Duration::try_from_secs_f64(dirty_age_seconds)
            .map_err(|_| pyo3::exceptions::PyValueError::new_err("an age is not negative"))?;
        let builder = bifolio::Cache::builder().memory(memory).dirty_age_max(age);
        let cache = py.detach(|| builder.build()).map_err(|error| exception(&error))?;
        Ok(Self { cache: Some(cache), process: std::process::id() })
    }

    /// Opens a file: `access` has the keys `write`, `create`, `create_new` and `truncate`.
    fn open(&self, py: Python<'_>, path: PathBuf, access: Access) -> PyResult<File> {
        let options = OpenOptions::new()
            .write(access.write)
            .create(access.create)
            .create_new(access.create_new)
            .truncate(access.truncate);
        let file = py.detach(|| self.get().open(path, &options));
        file.map(File::new).map_err(|error| exception(&error))
    }

    /// Returns all counters and levels by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.get().stats());
        let all = PyDict::new(py);
        for (name, value) in stats.counts().into_iter().chain(stats.levels()) {
            all.set_item(name, value)?;
        }
        all.set_item("fallbacks", &stats.fallbacks)?;
        Ok(all)
    }

    /// Changes the bound, bytes.
    fn set_memory(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        py.detach(|| self.get().set_memory(bytes)).map_err(|error| exception(&error))
    }

    /// Evicts the clean pages of all files. Returns the number of folios evicted.
    fn evict_all(&self, py: Python<'_>) -> PyResult<u64> {
        let evicted = py.detach(|| self.get().evict_all()).map_err(|error| exception(&error))?;
        Ok(evicted.folios)
    }

    /// Makes all writes durable and closes the cache for all its files.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.get().close()).map_err(|error| exception(&error))
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let cache = self.cache.take();
        if self.process != std::process::id() {
            // In a child, a thread that does not exist may hold a lock that the drop takes.
            return std::mem::forget(cache);
        }
        // The drop joins threads: other threads of the program may run meanwhile.
        let _ = Python::try_attach(|py| py.detach(|| drop(cache)));
    }
}
