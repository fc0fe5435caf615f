//! The class `Lines`: the iterator over the lines of a file object.
//!
//! A file object is raw: each call reads from the cache. A loop over lines takes a chunk at a time
//! instead, as the buffered files of Python do, and sets the position of the object to the end of
//! each line, so that a loop which ends early leaves it there. After a `seek` it starts anew.

use std::io::BufRead;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::file::File;

/// Bytes that are read at a time, unless a line is longer.
const CHUNK_BYTES: usize = 64 << 10;

/// An iterator over lines, with their ends.
#[derive(Debug)]
#[pyclass(module = "bifolio._core")]
pub(crate) struct Lines {
    /// The object of the class `bifolio.File`, whose `pread` knows of forks and modes.
    file: Py<PyAny>,
    /// Its compiled file when the last chunk was read.
    core: Option<Py<File>>,
    chunk: Vec<u8>,
    /// Index in the chunk of the next line.
    start: usize,
    /// Position in the file of the next line.
    position: u64,
}

#[pymethods]
impl Lines {
    #[new]
    fn new(file: Py<PyAny>) -> Self {
        Self { file, core: None, chunk: Vec::new(), start: 0, position: 0 }
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.meet_position(py)?;
        let mut searched = 0;
        loop {
            let mut rest = &self.chunk[self.start + searched..];
            // Reads from memory, which cannot fail.
            let count = rest.skip_until(b'\n')?;
            let end = self.start + searched + count;
            let is_whole = count > 0 && self.chunk[end - 1] == b'\n';
            searched = end - self.start;
            if is_whole || !self.read_more(py)? {
                return Ok((searched > 0).then(|| self.take(py, searched)));
            }
        }
    }
}

impl Lines {
    /// Forgets the chunk if the position of the object is not where the last line ended.
    fn meet_position(&mut self, py: Python<'_>) -> PyResult<()> {
        let position = match &self.core {
            Some(core) if !core.get().closed() => core.get().position(),
            _ => self.find_core(py)?,
        };
        if position != self.position {
            self.position = position;
            self.chunk.clear();
            self.start = 0;
        }
        Ok(())
    }

    /// Takes the compiled file of the object. Returns its position.
    fn find_core(&mut self, py: Python<'_>) -> PyResult<u64> {
        let handle = self.file.bind(py).getattr(intern!(py, "_open"))?.call0()?;
        let core = handle.getattr(intern!(py, "core"))?.call0()?.cast_into::<File>()?;
        let position = core.get().position();
        self.core = Some(core.unbind());
        Ok(position)
    }

    /// Reads what follows the chunk, and drops what is before the next line. Returns `false` at the
    /// end of the file.
    fn read_more(&mut self, py: Python<'_>) -> PyResult<bool> {
        self.chunk.drain(..self.start);
        self.start = 0;
        // More for a long line, which is searched once then.
        let wanted = self.chunk.len().max(CHUNK_BYTES);
        let position = self.position + self.chunk.len() as u64;
        let pread = self.file.bind(py).getattr(intern!(py, "pread"))?;
        let more = pread.call1((wanted, position))?.cast_into::<PyBytes>()?;
        self.chunk.extend_from_slice(more.as_bytes());
        self.find_core(py)?;
        Ok(!more.as_bytes().is_empty())
    }

    fn take<'py>(&mut self, py: Python<'py>, length: usize) -> Bound<'py, PyBytes> {
        let line = PyBytes::new(py, &self.chunk[self.start..self.start + length]);
        self.start += length;
        self.position += length as u64;
        if let Some(core) = &self.core {
            core.get().set_position(self.position);
        }
        line
    }
}
