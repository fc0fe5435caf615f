//! The class `File`: reads and writes of bytes at positions, and of many runs of bytes at once.

use std::sync::{PoisonError, RwLock};

use bifolio::Access;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffer::Bytes;
use crate::error::exception;
use crate::transfer::{self, Pattern};

/// Most bytes that are moved before the call looks for signals.
const STEP_BYTES_MAX: usize = 16 << 20;

/// An open file of a cache.
#[derive(Debug)]
#[pyclass(frozen, module = "bifolio._core")]
pub(crate) struct File {
    /// `None` once it is closed. Locked only to be cloned or taken.
    file: RwLock<Option<bifolio::File>>,
    /// The process that opened it.
    process: u32,
}

impl File {
    pub(crate) fn new(file: bifolio::File) -> Self {
        Self { file: RwLock::new(Some(file)), process: std::process::id() }
    }

    fn get(&self) -> PyResult<bifolio::File> {
        let file = self.file.read().unwrap_or_else(PoisonError::into_inner);
        file.clone().ok_or_else(|| PyValueError::new_err("the file is closed"))
    }

    /// Runs a call without the GIL.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&bifolio::File) -> bifolio::Result<T> + Send,
    ) -> PyResult<T> {
        let file = self.get()?;
        // A clone may be the last handle, whose drop writes dirty pages.
        let result = py.detach(move || call(&file));
        result.map_err(|error| exception(&error))
    }
}

#[pymethods]
impl File {
    /// Reads into `buffer` from `position` on. Returns the number of bytes, which is less than the
    /// length of `buffer` only at the end of the file.
    fn read_into(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        position: u64,
    ) -> PyResult<usize> {
        let mut bytes = Bytes::to_write(buffer)?;
        let mut done = 0;
        for step in bytes.slice_mut().chunks_mut(STEP_BYTES_MAX) {
            py.check_signals()?;
            let at = position.saturating_add(done as u64);
            let count = self.call(py, |file| transfer::read_full(file, step, at))?;
            done += count;
            if count < step.len() {
                break;
            }
        }
        Ok(done)
    }

    /// Reads runs of bytes into `buffer`, one after the other: for each of `positions`, `count`
    /// runs of `run` bytes that start `stride` bytes apart.
    fn read_runs(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        positions: PyBuffer<u64>,
        count: usize,
        stride: i64,
        run: usize,
    ) -> PyResult<()> {
        let mut bytes = Bytes::to_write(buffer)?;
        let positions = positions.to_vec(py)?;
        let mut pattern = Pattern::new(positions, count, stride, run, bytes.slice().len())?;
        let mut left = bytes.slice_mut();
        while !left.is_empty() {
            py.check_signals()?;
            let length = self.call(py, |file| pattern.read(file, left))?;
            left = &mut left[length..];
        }
        Ok(())
    }

    /// Writes all bytes of `buffer` at `position`.
    fn write(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>, position: u64) -> PyResult<()> {
        let bytes = Bytes::to_read(buffer)?;
        for (number, step) in bytes.slice().chunks(STEP_BYTES_MAX).enumerate() {
            py.check_signals()?;
            let at = position.saturating_add((number * STEP_BYTES_MAX) as u64);
            self.call(py, |file| file.write_all_at(step, at))?;
        }
        Ok(())
    }

    /// Writes runs of bytes from `buffer`, laid out as in [`Self::read_runs`].
    fn write_runs(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        positions: PyBuffer<u64>,
        count: usize,
        stride: i64,
        run: usize,
    ) -> PyResult<()> {
        let bytes = Bytes::to_read(buffer)?;
        let mut left = bytes.slice();
        let positions = positions.to_vec(py)?;
        let mut pattern = Pattern::new(positions, count, stride, run, left.len())?;
        while !left.is_empty() {
            py.check_signals()?;
            let length = self.call(py, |file| pattern.write(file, left))?;
            left = &left[length..];
        }
        Ok(())
    }

    /// Appends all bytes of `buffer`. Returns the position of the first.
    fn append(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<u64> {
        let bytes = Bytes::to_read(buffer)?;
        self.call(py, |file| file.append(bytes.slice()))
    }

    /// Returns the length in bytes.
    fn len(&self) -> PyResult<u64> {
        Ok(self.get()?.len())
    }

    /// Truncates the file, or grows it with zeros.
    fn set_len(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        self.call(py, |file| file.set_len(bytes))
    }

    /// Makes all writes durable.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, bifolio::File::sync_all)
    }

    /// Passes all writes to the kernel and waits for it, without a flush of the device.
    fn write_back(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |file| file.write_back(0..file.len()))
    }

    /// Announces reads at random, so that nothing is read ahead, or ends that.
    fn set_random(&self, is_random: bool) -> PyResult<()> {
        let access = if is_random { Access::Random } else { Access::Normal };
        self.get()?.set_access(access);
        Ok(())
    }

    /// Starts to read a range of bytes, and does not wait.
    fn prefetch(&self, py: Python<'_>, start: u64, end: u64) -> PyResult<()> {
        self.call(py, |file| file.prefetch(start..end))
    }

    /// Makes all writes durable and closes the file. Has no effect on a file that is closed.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let file = self.file.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(file) = file else { return Ok(()) };
        py.detach(|| file.close()).map_err(|error| exception(&error))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let file = self.file.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.process != std::process::id() {
            // As in the drop of a cache.
            return std::mem::forget(file);
        }
        if file.is_some() {
            // The last handle writes dirty pages: other threads of the program may run meanwhile.
            let _ = Python::try_attach(|py| py.detach(|| drop(file)));
        }
    }
}
