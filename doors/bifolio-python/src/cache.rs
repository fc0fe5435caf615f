//! The class `Cache`: a bound, its files, its counters.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bifolio::OpenOptions;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Failure, exception_of};
use crate::file::File;
use crate::shared::Shared;

/// Most transfers of a batch in flight. With 64, the default, a batch of 256 rows takes twice the
/// time of the kernel, and 1.2 times as long.
const IO_DEPTH: usize = 128;

/// Files that keep their pages when they are closed: a task of a pool opens its arrays, and closes
/// them at its end.
const KEPT_FILES: usize = 1000;

/// A cache with a bound on memory, in bytes.
#[derive(Debug)]
#[pyclass(frozen, module = "bifolio._core")]
pub(crate) struct Cache {
    /// `None` only while it is dropped.
    parts: Option<(bifolio::Cache, Arc<Shared>)>,
}

impl Cache {
    fn get(&self) -> &(bifolio::Cache, Arc<Shared>) {
        self.parts.as_ref().expect("a cache until it is dropped")
    }
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, FromPyObject)]
#[pyo3(from_item_all)]
struct Access {
    write: bool,
    create: bool,
    create_new: bool,
    truncate: bool,
}

#[pymethods]
impl Cache {
    /// Builds a cache. `parent` is the same cache in the parent process, for a forked child.
    #[new]
    #[pyo3(signature = (memory, dirty_age_seconds, parent=None))]
    fn new(
        py: Python<'_>,
        memory: u64,
        dirty_age_seconds: f64,
        parent: Option<&Bound<'_, Self>>,
    ) -> PyResult<Self> {
        let age = Duration::try_from_secs_f64(dirty_age_seconds)
            .map_err(|_| PyValueError::new_err("the age of writes is a number of seconds"))?;
        let builder = bifolio::Cache::builder();
        let builder = builder.memory(memory).dirty_age_max(age).io_depth(IO_DEPTH);
        let builder = builder.kept_files(KEPT_FILES);
        let cache = py.detach(|| builder.build()).map_err(Failure::from)?;
        let shared = Shared::new(py, parent.map(|parent| &*parent.get().get().1));
        Ok(Self { parts: Some((cache, shared)) })
    }

    /// Opens a file: `access` has the keys `write`, `create`, `create_new` and `truncate`.
    fn open(&self, py: Python<'_>, path: PathBuf, access: Access) -> PyResult<File> {
        let (cache, shared) = self.get();
        let name = path.display().to_string();
        // Not truncated by the open, so that all handles of the file learn of it.
        let options = OpenOptions::new()
            .write(access.write)
            .create(access.create)
            .create_new(access.create_new);
        let file = py.detach(|| cache.open(path, &options)).map_err(Failure::from)?;
        let added = shared.add(py, &file, access.write, access.truncate, &name);
        let inode = match added {
            Ok(inode) => inode,
            Err(failure) => {
                py.detach(|| drop(file));
                return Err(failure.into());
            }
        };
        let file = File::new(file, inode, Arc::clone(shared), access.write, name);
        if access.truncate {
            file.truncate(py)?;
        }
        Ok(file)
    }

    /// Returns all counters and levels by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.get().0.stats());
        let all = PyDict::new(py);
        for (name, value) in stats.counts().into_iter().chain(stats.levels()) {
            all.set_item(name, value)?;
        }
        all.set_item("fallbacks", &stats.fallbacks)?;
        Ok(all)
    }

    /// Changes the bound, bytes.
    fn set_memory(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        Ok(py.detach(|| self.get().0.set_memory(bytes)).map_err(Failure::from)?)
    }

    /// Evicts the clean pages of all files. Returns the number of folios evicted.
    fn evict_all(&self, py: Python<'_>) -> PyResult<u64> {
        let evicted = py.detach(|| self.get().0.evict_all()).map_err(Failure::from)?;
        Ok(evicted.folios)
    }

    /// Writes a list of the pages in memory to a file. Returns the bytes of these pages.
    fn save_hot(&self, py: Python<'_>, path: PathBuf) -> PyResult<u64> {
        let saved = py.detach(|| self.get().0.save_hot(path)).map_err(Failure::from)?;
        Ok(saved.page_bytes)
    }

    /// Starts to read the pages of a list; with `wait`, waits for those of files that are open.
    /// Returns the bytes read so far.
    fn restore_hot(&self, py: Python<'_>, path: PathBuf, wait: bool) -> PyResult<u64> {
        let restored = py.detach(|| {
            let restore = self.get().0.restore_hot(path)?;
            bifolio::Result::Ok(if wait { restore.wait() } else { restore.progress() })
        });
        Ok(restored.map_err(Failure::from)?.read_bytes)
    }

    /// Makes all writes of all files durable, with the headers. Returns the errors.
    fn sync(&self, py: Python<'_>) -> Vec<PyErr> {
        let failures = py.detach(|| self.get().1.sync());
        failures.into_iter().map(PyErr::from).collect()
    }

    /// Makes all writes durable and closes the cache for all its files. Has no effect on a cache
    /// that is closed.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let (cache, shared) = self.get();
        let failures = py.detach(|| shared.close(cache));
        exception_of(py, failures).map_or(Ok(()), Err)
    }

    /// `True` once it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.get().1.is_closed()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let Some((cache, shared)) = self.parts.take() else { return };
        if !shared.is_here() {
            // In a child, a thread that does not exist may hold a lock that the drop takes.
            return std::mem::forget((cache, shared));
        }
        // The drop joins threads: other threads of the program may run meanwhile.
        let _ = Python::try_attach(|py| {
            let failures = py.detach(|| {
                let failures = shared.close(&cache);
                drop((cache, shared));
                failures
            });
            if let Some(error) = exception_of(py, failures) {
                error.write_unraisable(py, None);
            }
        });
    }
}
