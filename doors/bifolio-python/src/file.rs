//! The class `File`: reads and writes of bytes at positions, of many runs of bytes at once, and of
//! rows that an array appends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use bifolio::Access;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyAttributeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyTuple};

use crate::buffer::Bytes;
use crate::error::{Failure, Result};
use crate::inode::{Append, Header, Inode, Layout, pass_on_at_end, write_back};
use crate::shared::Shared;
use crate::transfer::{self, Pattern};

/// Most bytes that are moved before the call looks for signals.
const STEP_BYTES_MAX: usize = 16 << 20;

/// An open file of a cache.
#[derive(Debug)]
#[pyclass(frozen, module = "bifolio._core")]
pub(crate) struct File {
    /// `None` once it is closed. Locked only with the GIL held, to be cloned or taken.
    open: RwLock<Option<Arc<Open>>>,
    name: String,
    /// Position of the file object, bytes. Here, so that an append changes it in the same call.
    position: AtomicU64,
}

/// The handle, the inode and the cache of an open file.
#[derive(Debug)]
struct Open {
    file: bifolio::File,
    inode: Arc<Inode>,
    shared: Arc<Shared>,
    may_write: bool,
}

impl Open {
    /// Makes all writes durable. Where that fails, the file stays open in the cache after its last
    /// handle, and the cache tries again.
    fn finish(&self) -> Result<()> {
        if !self.may_write || self.shared.is_closed() {
            return Ok(());
        }
        match self.inode.sync(&self.file) {
            // All was durable when the cache closed.
            Err(failure) if failure.is_closed() && self.shared.is_closed() => Ok(()),
            Err(failure) => {
                self.inode.keep();
                Err(failure)
            }
            Ok(()) => Ok(()),
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // Rows that another thread appended while the handle was closed.
        if self.inode.has_due_header() {
            // The inode is kept where this fails, and the close of the cache reports it.
            let _ = self.finish();
        }
        self.shared.remove(self.file.identity());
    }
}

impl File {
    pub(crate) fn new(
        file: bifolio::File,
        inode: Arc<Inode>,
        shared: Arc<Shared>,
        may_write: bool,
        name: String,
    ) -> Self {
        let open = Open { file, inode, shared, may_write };
        Self { open: RwLock::new(Some(Arc::new(open))), name, position: AtomicU64::new(0) }
    }

    fn get(&self) -> PyResult<Arc<Open>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.clone().ok_or_else(|| self.closed_error())
    }

    fn closed_error(&self) -> PyErr {
        PyValueError::new_err(format!("{} is closed", self.name))
    }

    fn take(&self) -> Option<Arc<Open>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Runs a call on the handle and the inode without the GIL.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Open) -> Result<T> + Send,
    ) -> PyResult<T> {
        let open = self.get()?;
        // A clone may be the last handle, whose drop writes dirty pages.
        Ok(py.detach(move || call(&open))?)
    }

    /// Reads into `buffer` what is in memory, with the GIL held. Returns `false` if the call would
    /// wait, or if the file ends before.
    pub(crate) fn read_in_memory(&self, buffer: &mut [u8], position: u64) -> PyResult<bool> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = &*open else { return Err(self.closed_error()) };
        Ok(open.file.try_read_prefix_at(buffer, position).is_ok_and(|done| done == buffer.len()))
    }

    /// Runs a call on the handle without the GIL.
    pub(crate) fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&bifolio::File) -> bifolio::Result<T> + Send,
    ) -> PyResult<T> {
        self.run(py, |open| Ok(call(&open.file)?))
    }

    /// Makes the file empty, whatever other handles it has.
    pub(crate) fn truncate(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |open| open.inode.create(&open.file, &[], 0))
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

    /// Returns the bytes from `position` on, fewer than `length` only at the end of the file.
    fn read<'py>(
        &self,
        py: Python<'py>,
        length: usize,
        position: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let left = self.len()?.saturating_sub(position);
        let length = length.min(usize::try_from(left).unwrap_or(usize::MAX));
        let mut count = 0;
        let bytes = PyBytes::new_with(py, length, |buffer| {
            for step in buffer.chunks_mut(STEP_BYTES_MAX) {
                py.check_signals()?;
                let at = position + count as u64;
                let done = self.call(py, |file| transfer::read_full(file, step, at))?;
                count += done;
                if done < step.len() {
                    break;
                }
            }
            Ok(())
        })?;
        // Another thread may have truncated the file meanwhile.
        let is_short = count < length;
        Ok(if is_short { PyBytes::new(py, &bytes.as_bytes()[..count]) } else { bytes })
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
        self.call(py, pass_on_at_end)
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
        self.call(py, pass_on_at_end)
    }

    /// Appends all bytes of `buffer`, and moves the position to the new end, unless there are none,
    /// as the kernel does. Returns their number.
    ///
    /// This is `write` of a file object that appends, without code of Python around it: after an
    /// interrupt, `io.BufferedWriter` writes again what a `write` that raised may have written.
    fn write_at_end(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        let source = Bytes::to_read(buffer)?;
        let bytes = source.slice();
        let length = bytes.len();
        let end = self.run(py, |open| {
            if !open.shared.is_here() {
                let text = format!("{} was opened for writing in another process", self.name);
                return Err(Failure::Value(text));
            }
            let position = open.file.append(bytes)?;
            pass_on_at_end(&open.file)?;
            Ok(position + length as u64)
        })?;
        if length > 0 {
            // Relaxed: only the value counts; threads that share the object need a lock.
            self.position.store(end, Ordering::Relaxed);
        }
        Ok(length)
    }

    /// The position of the file object, bytes.
    #[getter]
    pub(crate) fn position(&self) -> u64 {
        // Relaxed: as in `write_at_end`.
        self.position.load(Ordering::Relaxed)
    }

    #[setter]
    pub(crate) fn set_position(&self, position: u64) {
        // Relaxed: as in `write_at_end`.
        self.position.store(position, Ordering::Relaxed);
    }

    /// Appends the rows in `buffer` to an array, and sets the attribute `_shape` of `array` to its
    /// new shape. `header` is the text of the header before and after the number of rows, and its
    /// length in bytes.
    ///
    /// One compiled call: an interrupt comes before or after all of it.
    #[pyo3(signature = (array, buffer, rows_added, base, row_bytes, epoch, header))]
    #[expect(clippy::too_many_arguments, reason = "one call, so that nothing comes between")]
    fn append_rows(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        buffer: &Bound<'_, PyAny>,
        rows_added: u64,
        base: u64,
        row_bytes: u64,
        epoch: u64,
        header: Option<(Vec<u8>, Vec<u8>, usize)>,
    ) -> PyResult<()> {
        let source = Bytes::to_read(buffer)?;
        let header = header.map(|(before, after, bytes)| Header { before, after, bytes });
        let layout = Layout { base, row_bytes, header };
        let rows = shape_of(array)?.get_item(0)?.extract()?;
        let bytes = source.slice();
        let append = Append { layout, rows, epoch, rows_added, bytes };
        let rows = self.run(py, |open| {
            let rows = open.inode.append(&open.file, &append, &self.name)?;
            pass_on_at_end(&open.file)?;
            Ok(rows)
        })?;
        // Of two threads that append, the first may come here last.
        let shape = shape_of(array)?;
        if shape.get_item(0)?.extract::<u64>()? < rows {
            let lengths = shape.iter().skip(1);
            let all = [rows.into_pyobject(py)?.into_any()].into_iter().chain(lengths);
            array.setattr(intern!(py, "_shape"), PyTuple::new(py, all.collect::<Vec<_>>())?)?;
        }
        Ok(())
    }

    /// Returns the number of rows of the array that grows in the file, if it has this layout.
    fn rows(&self, py: Python<'_>, base: u64, row_bytes: u64) -> PyResult<Option<u64>> {
        self.run(py, |open| Ok(open.inode.rows_of(base, row_bytes)))
    }

    /// Returns a number that changes when the file is created anew or truncated.
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, |open| Ok(open.inode.epoch()))
    }

    /// Makes the file one of `length` zeros that starts with `head`, in the kernel, too.
    fn create(&self, py: Python<'_>, head: &Bound<'_, PyAny>, length: u64) -> PyResult<()> {
        let source = Bytes::to_read(head)?;
        let head = source.slice();
        self.run(py, |open| open.inode.create(&open.file, head, length))
    }

    /// Cuts what is past `end`. Returns the number of bytes.
    fn cut(&self, py: Python<'_>, end: u64) -> PyResult<u64> {
        self.run(py, |open| open.inode.cut(&open.file, end))
    }

    /// Returns the length in bytes.
    fn len(&self) -> PyResult<u64> {
        Ok(self.get()?.file.len())
    }

    /// Truncates the file, or grows it with zeros.
    fn set_len(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        self.run(py, |open| open.inode.set_len(&open.file, bytes))
    }

    /// Makes all writes durable, then the header that counts the rows among them.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |open| open.inode.sync(&open.file))
    }

    /// Passes all writes to the file to the kernel, whichever handle made them, and waits for it,
    /// without a flush of the device.
    fn write_back(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |open| {
            let own = open.may_write.then_some(&open.file);
            let Some(file) = own.or_else(|| open.inode.writer()) else { return Ok(()) };
            Ok(write_back(file)?)
        })
    }

    /// Announces reads at random, so that nothing is read ahead, or ends that.
    fn set_random(&self, is_random: bool) -> PyResult<()> {
        let access = if is_random { Access::Random } else { Access::Normal };
        self.get()?.file.set_access(access);
        Ok(())
    }

    /// Starts to read a range of bytes, and does not wait.
    fn prefetch(&self, py: Python<'_>, start: u64, end: u64) -> PyResult<()> {
        self.call(py, |file| file.prefetch(start..end))
    }

    /// Returns `true` if both are handles of the same file.
    fn is_same_file(&self, other: &Bound<'_, Self>) -> PyResult<bool> {
        Ok(self.get()?.file.identity() == other.get().get()?.file.identity())
    }

    /// Makes all writes durable and closes the file. Has no effect on a file that is closed. In a
    /// forked child, it only forgets the file of the parent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(open) = self.take() else { return Ok(()) };
        if !open.shared.is_here() {
            std::mem::forget(open);
            return Ok(());
        }
        Ok(py.detach(move || open.finish())?)
    }

    /// `True` once it or its cache is closed.
    #[getter]
    pub(crate) fn closed(&self) -> bool {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.as_ref().is_none_or(|open| open.shared.is_closed())
    }
}

/// The property `closed` of the class `bifolio.File`.
///
/// A wrapper of `io` asks the raw file whether it is closed, and takes any failure for a yes. Code
/// of Python could be interrupted there; a compiled descriptor is not.
#[derive(Debug)]
#[pyclass(frozen, module = "bifolio._core")]
pub(crate) struct Closed;

#[pymethods]
impl Closed {
    #[new]
    fn new() -> Self {
        Self
    }

    /// `True` after `close`, of the file or its cache.
    fn __get__<'py>(
        slf: Bound<'py, Self>,
        file: Option<&Bound<'py, PyAny>>,
        _class: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let Some(file) = file else { return Ok(slf.into_any()) };
        let handle = file.getattr(intern!(py, "_handle"))?;
        let core = if handle.is_none() { handle } else { handle.getattr(intern!(py, "_core"))? };
        let is_closed = core.is_none() || core.cast::<File>()?.get().closed();
        Ok(PyBool::new(py, is_closed).to_owned().into_any())
    }

    /// Always fails, so that an attribute of the object cannot hide the property.
    fn __set__(&self, _file: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>) -> PyResult<()> {
        Err(PyAttributeError::new_err("closed cannot be set"))
    }
}

fn shape_of<'py>(array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
    Ok(array.getattr(intern!(array.py(), "_shape"))?.cast_into::<PyTuple>()?)
}

impl Drop for File {
    fn drop(&mut self) {
        let Some(open) = self.take() else { return };
        if !open.shared.is_here() {
            // In a child, a thread that does not exist may hold a lock that the drop takes.
            return std::mem::forget(open);
        }
        // Writes dirty pages: other threads of the program may run meanwhile.
        let _ = Python::try_attach(|py| {
            if let Err(failure) = py.detach(move || open.finish()) {
                PyErr::from(failure).write_unraisable(py, None);
            }
        });
    }
}
